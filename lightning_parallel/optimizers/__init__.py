"""How the user's own optimizers step parameters that ranks have divided.

Elementwise ones step each rank's part as it is, and nothing here runs. Others treat a parameter as a whole, and
``owners.py`` gives them whole ones, which ``division.py`` collects. Which kind an optimizer is,
:mod:`lightning_parallel.checks.optimizer_trial` finds before training.

``options.py`` steps with the options of an earlier batch, and ``undoable.py`` undoes a step.
"""
