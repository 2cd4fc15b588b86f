"""The dry run of the user's step: it runs once without values, and a trace says what it does.

``dry_run.py`` runs it, ``recorder.py`` records what happens, and ``trace.py`` has the trace. ``snapshot.py`` and
``own_generators.py`` put modules and generators back afterwards, and ``plain_values.py`` watches attributes that aren't
tensors. ``operations.py`` counts what the step costs, and ``repeated.py`` finds layers that can't run twice.
"""
