"""Worker processes that functions are sent to, for the tests and for the programs that train many small models.

    pool.py               the pool: starts, watches and replaces them
    worker.py             what runs in one, and what a function there may call
    preloaded.py          what is imported before workers are forked
    held.py               what a rank holds of a model
    environment.py        variables of all of them; imported before torch
    torchvision_ops.py    lets torchvision be imported; imported before Lightning

Measurements start fresh processes for each figure instead (``tools/bench/processes.py``).
"""
