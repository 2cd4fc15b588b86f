"""Private names of Lightning and torchmetrics, by the part of Lightning that they belong to."""
