"""A backward in two halves (``split.py``, ``matmuls.py``), and layers that run again in it (``recompute.py``)."""
