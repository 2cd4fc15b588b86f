"""Compares a layout with one process, on a module of the user's own.

``check.py`` runs both, ``evidence.py`` notes what a run has come to, ``differences.py`` compares, and ``rounding.py``
finds how far rounding may move a number. It trains by Lightning's public Trainer, and knows nothing of how a layout
works but which part of a parameter a rank holds.
"""
