"""What can't be as in one process is found by trying, and refused by name before training.

Optimizers that treat parameters as a whole, modules that step optimizers themselves, steps that change their batch,
tensor ranks that come to different losses, and modules of the other Lightning package.
"""
