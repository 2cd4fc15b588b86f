"""Tensor parallelism by hand: plain local tensors, explicit collectives. Knows no Lightning."""
