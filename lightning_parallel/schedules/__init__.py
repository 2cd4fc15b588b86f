"""A schedule is data: for each stage, the list of what it computes. Neither a process nor a tensor is needed here.

``actions.py`` says what lists are made of. ``generators.py``, ``v_shaped.py``, ``asynchronous.py`` and
``asynchronous_v.py`` make them, those of a V from blocks (``blocks.py``, ``filling.py``). ``named.py`` names them, and
``checks.py`` checks them. ``simulate.py`` computes what they cost, and ``steady.py`` what endless lists do.
``pipeline/engine.py`` runs them.
"""
