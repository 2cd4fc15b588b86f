"""What steps return and log, and how all stages get it from the last one, the only one that runs a step to its end.

``logs.py`` and ``log_joins.py`` make one value of those that microbatches log. ``last_stage.py`` runs what only the
last stage can run; ``late_values.py`` and ``hook_changes.py`` bring the results to the others.
``metric_sync.py`` says over which ranks metrics gather, and ``timelines.py`` gathers what ran when.
"""
