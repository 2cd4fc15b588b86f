"""Layers divided over tensor ranks, by hand: plain local tensors and explicit collectives. It knows no Lightning.

``functions.py`` has the collectives as autograd sees them, ``layer.py`` what all divided layers share. Which modules of
a model are divided is in ``tensor_plans``.
"""
