"""One checkpoint format for every layout: a directory that any number of ranks writes, and any number reads.

What one rank holds: ``rank.py`` collects it, ``slices.py`` describes shards of it to torch, ``random_state.py`` has its
generators.

A directory: ``format.py`` writes and reads it, ``keys.py`` names its tensors, ``agreement.py`` says what ranks must
agree on, and ``directory.py`` replaces it as a whole.

Files that somebody else may have made, or damaged: ``reading.py`` reads them without running code in them, and
``whole.py`` finds out which are as they were written.

Other kinds: ``plain.py`` reads a checkpoint as one process has it, and ``convert.py`` makes one kind of another.

In a run: ``in_trainer.py`` saves and loads for the Trainer, ``background.py`` saves while training goes on,
``state_dicts.py`` checks what the module's ``state_dict()`` returns, and ``hyperparameters.py`` saves hyperparameters.
"""

from lightning_parallel.checkpoint.convert import convert
from lightning_parallel.checkpoint.format import Loaded, is_checkpoint, load, remove, save
from lightning_parallel.checkpoint.keys import OptimizerState
from lightning_parallel.checkpoint.plain import PlainOnDemand, read_full, read_plain
from lightning_parallel.checkpoint.whole import is_whole, newest_in

__all__ = [
    "Loaded",
    "OptimizerState",
    "PlainOnDemand",
    "convert",
    "is_checkpoint",
    "is_whole",
    "load",
    "newest_in",
    "read_full",
    "read_plain",
    "remove",
    "save",
]
