"""Tensors without values, and modules that answer with them in the place of what another stage computes.

``tensor.py`` is such a tensor, whose ``origins.py`` say what it was computed from. ``module.py`` makes a module absent,
``forward.py`` answers its calls, and ``on_meta.py`` computes shapes.
"""
