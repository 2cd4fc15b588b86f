"""A batch's loss, and its gradients, from those of its microbatches: what each loss averages over, read off its graph.

``graph.py`` reads a graph by the names in ``operations.py``, ``counts.py`` says what the loss averages over,
``normaliser.py`` weights microbatches, and ``trial.py`` tests the result on two microbatches as one. It knows no
Lightning.
"""
