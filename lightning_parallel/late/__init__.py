"""The asynchronous pipeline: updates without a flush, so with gradients that are late.

``settings.py`` has its settings and warnings, ``training.py`` its updates and drains. The versions of the weights are
in ``pipeline/weights.py``, the formulas in ``pipeline/staleness.py``, the endless list in
``schedules/asynchronous.py``, and the rates that belong to a late update in ``optimizers/options.py``.
"""
