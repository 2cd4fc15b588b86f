"""Callbacks: stopping at a signal, going on exactly, looking out for NaN, and what a run reports about itself.

``defaults.py`` says which of them strategies bring along, and which of Lightning's they refuse. Nothing here is needed
to train.
"""
