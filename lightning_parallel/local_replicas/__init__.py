"""Data parallelism in one process: replicas of a model run one after the other. It knows no Lightning.

``data_parallel.py`` puts the steps together: a batch is divided, the model copied (``replicate.py``), each replica runs
on its share, and the outputs are joined (``join.py``), all as one autograd graph. GPUs compute at the same time, since
a replica only launches its kernels.
"""
