"""Gradients as all strategies need them: swapped in and out of parameters, averaged, summed, and clipped.

``clipping.py`` makes Lightning clip by the norm of the whole model, and ``loss_scale.py`` makes all ranks skip the same
updates. ``hook_watch.py`` refuses hooks that would use the norm of a part, or write to a copy.
"""
