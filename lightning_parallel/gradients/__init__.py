"""Gradients as all strategies need them: swapped in and out of parameters, summed, averaged, and clipped."""
