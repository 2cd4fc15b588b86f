"""One checkpoint format for every layout: a directory that any number of ranks writes, and any number reads.

``format.py`` writes and reads a directory. ``keys.py`` names its tensors, ``slices.py`` describes shards of them to
torch, and ``agreement.py`` compares what the ranks have. ``directory.py`` replaces a directory as a whole, and finds
what is damaged; ``reading.py`` reads it without running code in it.

``plain.py`` has a checkpoint as one process has it, and makes one file of it.

In a run, ``trainer_checkpoints.py`` saves and loads for the Trainer, ``rank_states.py`` collects what a rank has, and
``background.py`` saves while training goes on.
"""

from lightning_parallel.checkpoint.directory import is_checkpoint, is_whole, newest_in, remove
from lightning_parallel.checkpoint.plain import PlainOnDemand, convert, read_full, read_plain

__all__ = [
    "PlainOnDemand",
    "convert",
    "is_checkpoint",
    "is_whole",
    "newest_in",
    "read_full",
    "read_plain",
    "remove",
]
