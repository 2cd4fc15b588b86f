"""A stage at work: it runs its chunks of the user's step in the order of a schedule. It knows no Lightning.

``engine.py`` walks the list of actions, ``chunk.py`` runs one forward or backward with its messages, ``stage.py`` runs
the user's step up to the cut, with ``forward_pass.py``. ``weights.py`` has the versions of the weights that forwards
and backwards read, ``staleness.py`` the formulas for late gradients. By ``validation.py`` stages learn, in a
batch, whether the update before it holds.

Where the module is cut belongs in ``cuts/``, what an action costs in ``schedules/``, bytes in ``messages/``.
"""
