"""Tensors without values (elsewhere called fake tensors), and modules that return them in the place of what another
stage computes.

``tensor.py`` has these tensors, and ``origins.py`` the record of what each was computed from. ``module.py`` makes a
module absent, ``answers.py`` answers its calls, and ``on_meta.py`` computes shapes on torch's meta device. ``modes.py``
lets code go on that needs values.
"""
