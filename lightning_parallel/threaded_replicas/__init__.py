"""Data parallelism in one process, with a thread for each replica. It knows no Lightning.

A batch is divided (``scatter.py``), the model is copied (``replicate.py``), each replica runs in its thread
(``threads.py``), its autograd graph becomes one node of the graph around it (``graphs.py``), and the outputs are joined
(``join.py``). ``data_parallel.py`` puts these steps together; ``metrics.py`` is about what replicas share.
"""
