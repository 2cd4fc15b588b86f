"""The user's data loaders: replicas get different samples, and the ranks of one replica the same batches.

``loaders.py`` makes loaders and the generators that they draw from agree. ``first_batch.py`` takes a batch before
training, to trace the step with, and ``read_ahead.py`` gives it back to loaders that don't begin anew.

How a batch is split belongs in ``set_up/splitting.py``, what the tensors of a batch are in ``batch.py``.
"""
