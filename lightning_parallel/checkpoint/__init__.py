"""One checkpoint format for every layout: a directory that any number of ranks writes, and any number reads.

``format.py`` writes and reads it, ``agreement.py`` says what the ranks must agree on, ``sharing.py`` who writes what
several hold, ``directory.py`` replaces directories as a whole, ``reading.py`` reads files that somebody else may have
made, and ``integrity.py`` tells damaged ones. ``slices.py`` describes a rank's shard to torch, ``optimizers.py`` keeps
several optimizers' states apart, ``places.py`` what belongs to one place in a layout, and ``rank.py`` collects what a
rank holds. ``plain.py`` reads a checkpoint as one process has it, and ``convert.py`` makes one kind of another.
"""

from lightning_parallel.checkpoint.convert import convert
from lightning_parallel.checkpoint.format import Loaded, is_checkpoint, load, remove, save
from lightning_parallel.checkpoint.integrity import is_whole, newest_in
from lightning_parallel.checkpoint.optimizers import OptimizerState
from lightning_parallel.checkpoint.plain import read_full, read_plain

__all__ = [
    "Loaded",
    "OptimizerState",
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
