"""Tensor parallelism by hand: plain local tensors and explicit collectives. It knows no Lightning.

``functions.py`` has the collectives as autograd sees them; ``linear.py``, ``embedding.py`` and ``loss.py`` the layers;
``styles.py`` how a layer of a model is divided, ``plan.py`` which layers are, and ``sharding.py`` does it.
"""
