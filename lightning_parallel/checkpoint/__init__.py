"""One checkpoint format for every layout: a directory that any number of ranks writes, and any number reads.

What one rank holds: ``rank.py`` collects it, ``slices.py`` describes shards of it to torch, ``optimizers.py`` keeps
several optimizers' states apart, ``places.py`` and ``random_state.py`` have what belongs to one place in a layout.

A directory: ``format.py`` writes and reads it, ``agreement.py`` says what the ranks must agree on, ``sharing.py`` who
writes what several hold, ``fitting.py`` whether it is of this model, and ``directory.py`` replaces it as a whole.

Files that somebody else may have made, or damaged: ``reading.py`` reads them, ``archive.py`` and ``contents.py``
compare them with their checksums, ``newest.py`` finds those that are whole.

Other kinds: ``plain.py`` reads a checkpoint as one process has it, ``safetensors_file.py`` weights alone, and
``convert.py`` makes one kind of another.
"""

from lightning_parallel.checkpoint.convert import convert
from lightning_parallel.checkpoint.format import Loaded, is_checkpoint, load, remove, save
from lightning_parallel.checkpoint.newest import is_whole, newest_in
from lightning_parallel.checkpoint.optimizers import OptimizerState
from lightning_parallel.checkpoint.plain import PlainOnDemand, read_full, read_plain

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
