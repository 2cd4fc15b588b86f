"""Lightning's step in a pipeline: a batch becomes microbatches, whose losses and outputs become those of the batch.

``microbatches.py`` is the way of a training batch, ``evaluation.py`` and ``several_passes.py`` that of any other.
``loss_means.py`` weights the losses of microbatches, which ``loss_pairs.py`` tries. Since the step runs for each
microbatch, and for each chunk of a stage, the rest keeps or refuses what it would do too often: ``once_a_batch.py``,
``earlier_chunks.py``, ``effects.py``, ``left_by_steps.py``. ``between_batches.py`` decides whether stages wait, and
``equal_steps.py`` gives fully sharded replicas the same number of prediction steps.

What a step returns and logs belongs in ``results/``.
"""
