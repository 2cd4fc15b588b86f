"""Tensor parallelism by hand: plain local tensors and explicit collectives. It knows no Lightning.

``functions.py`` has the collectives as autograd sees them; ``linear.py``, ``embedding.py`` and ``loss.py`` the layers;
``styles.py`` and ``around.py`` how a module is divided; ``plan.py`` which ones are, where ``pairs.py`` and
``plan_search.py`` may find them by trying; ``sharding.py`` divides a model.
"""
