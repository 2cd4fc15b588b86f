"""Which modules of a model are divided over tensor ranks, and how. The divided layers are in ``tensor/``.

``style.py``, ``styles.py`` and ``around.py`` say how a module is divided; ``plan.py`` which ones are: ``rules.py``
matches a plan's patterns, ``pairs.py`` and ``plan_search.py`` find a plan by trying. ``sharding.py`` divides a model,
and ``sequence.py`` what lies between its divided layers. The room knows no Lightning.
"""
