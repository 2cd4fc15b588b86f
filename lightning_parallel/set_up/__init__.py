"""Before the first batch: what the user's step does, where the module is cut, and what this rank holds of it.

``options.py`` has the settings that several strategies share. ``cutting.py`` decides where the module is cut, with a
batch that is split as ``splitting.py`` says, and the hooks that ``step_hooks.py`` traces. ``stages.py`` takes this
rank's part, ``tensor_shards.py`` and ``unit_shards.py`` divide its layers, and ``replicas.py`` has its copies.
``original_names.py`` finds what still refers to the parameters of the whole module, and ``averages.py`` averages
weights of which ranks hold parts. ``dry_runs.py`` finds what crosses the cuts, when the first step of a kind is about
to run. ``part_of_model.py`` is about a module that is only a part of the model.

All but the flows is made before the first batch. Some parts are used in each, such as ``splitting.py``; what only runs
in a batch belongs in ``steps/``.
"""
