"""Checks, most of them by a trial: whatever can't have the numbers of one process is refused by name before training.

``optimizer_trial.py`` finds optimizers that treat parameters as wholes, by trials on small ones
(``small_optimizer.py``, ``no_collectives.py``).
``manual.py`` is about modules that step optimizers themselves. ``first_steps.py`` finds tensor ranks that return, log
or keep different values, ``parted_options.py`` replicas with other learning rates, ``reads_of_shards.py`` code that
takes a rank's part of a parameter for the parameter, and ``other_lightning.py`` modules of ``pytorch_lightning``.
``late_gradients.py`` has what asynchronous pipelines refuse, ``error_notes.py`` explains what ends a run all the
same.
"""
