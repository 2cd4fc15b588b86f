"""Gradients as all strategies need them: swapped in and out of parameters, averaged, summed, and clipped.

``clipping.py`` makes Lightning clip by the norm of the whole model, ``hook_watch.py`` refuses hooks that would use the
norm of a part, and ``lost_changes.py`` writes that would change a copy.
"""
