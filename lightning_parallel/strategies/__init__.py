"""What a Trainer is given: a page for each strategy, which shows the order in which a batch meets the parts.

How a part works is not said here, but in its own room.
"""
