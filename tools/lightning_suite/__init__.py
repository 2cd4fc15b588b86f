"""Runs Lightning's own tests with a strategy of this package in the place of the default one.

``plugin.py`` puts the strategy in and notes how each test ends; ``pairs.py`` runs a test on two ranks. ``__main__.py``
runs the tests, keeps what differs from one process in ``recorded.json``, and writes the section of docs/limits.md.
"""
