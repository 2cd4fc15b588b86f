"""One checkpoint format for every layout: a directory that any number of ranks writes, and any number reads.

``format.py`` writes and reads it, ``agreement.py`` says what the ranks must agree on, ``directory.py`` replaces
directories as a whole, ``reading.py`` reads files that somebody else may have made, ``slices.py`` describes a rank's
shard to torch, ``optimizers.py`` keeps the states of several optimizers apart, and ``rank.py`` collects what a rank
holds.
"""

from lightning_parallel.checkpoint.format import Loaded, is_checkpoint, load, read_full, remove, save
from lightning_parallel.checkpoint.optimizers import OptimizerState

__all__ = ["Loaded", "OptimizerState", "is_checkpoint", "load", "read_full", "remove", "save"]
