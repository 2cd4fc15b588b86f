"""How the user's own optimizers step: on parameters that ranks have divided, later, or once more.

Of parameters that ranks have divided, elementwise optimizers step each rank's part as it is. Others treat a parameter
as a whole, and ``owners.py`` gives them whole ones, which ``division.py`` collects. Which kind an optimizer is,
:mod:`lightning_parallel.checks.optimizer_trial` finds before training.

``options.py`` makes a step with the options of an earlier batch, and ``undoable.py`` undoes one and makes it again.
``undoable_scaler.py`` does the same where a loss scaler decides whether there is a step.
``closures.py`` has steps begin when their closure has run.
"""
