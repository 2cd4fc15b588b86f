"""Where a module is cut, and what crosses the cuts: values that all ranks agree on before training.

``search.py`` finds the best cut by traces, with ``layers.py``, ``order.py``, ``balance.py`` and ``candidate.py``; a cut
is described by ``partition.py``. ``flow_of_step.py`` finds what crosses the cuts in a step, which ``flow.py``
describes. ``placed_step.py`` places the step's calls on chunks, and ``one_sided.py`` refuses what only some chunks
would do. The room knows no Lightning.
"""
