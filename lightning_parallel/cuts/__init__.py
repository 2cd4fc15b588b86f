"""Where a module is cut, and what crosses the cuts: values that all ranks agree on before training.

``search.py`` finds the best cut by traces, from ``layers.py``, ``order.py``, ``balance.py`` and ``candidate.py``, as a
``partition.py``. ``flow_of_step.py`` finds what crosses the cuts in a step, as a ``flow.py``, from a
``placed_step.py``; ``one_sided.py`` refuses what only some chunks would do. It knows no Lightning.
"""
