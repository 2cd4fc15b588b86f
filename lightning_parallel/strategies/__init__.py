"""What a Trainer is given: a file for each strategy, which shows the order in which a batch meets the parts.

How a part works is explained in its own room.
"""
