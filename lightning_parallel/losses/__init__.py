"""A batch's loss, and its gradients, from those of its microbatches: what each loss averages over, read off its graph.

``normaliser.py`` weights microbatches, ``graph.py`` reads a graph, and ``trial.py`` tests the result on two
microbatches as one. It knows no Lightning.
"""
