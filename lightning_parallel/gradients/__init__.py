"""Gradients as all strategies need them: swapped in and out of parameters, summed, averaged, and clipped.

``in_trainer.py`` makes Lightning clip by them, ``hook_watch.py`` refuses hooks that would see a part of them only.
"""
