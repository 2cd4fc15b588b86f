"""Data parallelism in one process, with a thread for each replica. It knows no Lightning.

``data_parallel.py`` puts the steps together: a batch is divided, the model copied (``replicate.py``), each replica runs
in its thread (``threads.py``), and the outputs are joined (``join.py``), all as one autograd graph. ``metrics.py`` is
about what replicas share.
"""
