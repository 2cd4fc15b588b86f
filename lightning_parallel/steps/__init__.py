"""Lightning's step in a pipeline: a batch becomes microbatches, whose losses and outputs become those of the batch.

``microbatches.py`` runs a training batch. ``loss_means.py`` weights the losses of microbatches, and ``pairs.py`` tries
whether the weights are right, and whether layers before the loss compute with several samples. The step runs for each
microbatch, so its side effects would happen several times: ``changes.py`` prevents this or refuses it, ``effects.py``
refuses others, and ``kept_state.py`` finds some. ``between_batches.py`` decides whether stages wait for each other, and
``post_validation.py`` clips where they don't.

What a step returns and logs belongs in ``results/``.
"""
