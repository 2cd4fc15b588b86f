"""A backward in two halves (``split.py``, ``matmuls.py``), layers that run again in it (``recompute.py``), and
gradients in memory of their own (``apart.py``)."""
