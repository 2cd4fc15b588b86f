"""What the user's step does, found by running it once without values.

``trace.py`` runs it, ``tracer.py`` notes what happens, and ``traced.py`` is the result. Afterwards all is as before:
``snapshot.py``, ``own_generators.py``, ``plain_values.py``. ``operations.py`` and ``timing.py`` measure what it costs.
"""
