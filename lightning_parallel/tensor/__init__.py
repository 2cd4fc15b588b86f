"""Layers divided over tensor ranks, by hand: plain local tensors and explicit collectives. It knows no Lightning.

``functions.py`` has the collectives as autograd sees them, ``layer.py`` what all divided layers share. ``linear.py``
and ``embedding.py`` have these layers, ``dropout.py`` the random numbers inside and outside of them. Which modules of a
model are divided, ``tensor_plans/`` says.
"""
