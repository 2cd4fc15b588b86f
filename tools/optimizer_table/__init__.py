"""Optimizers under every layout, each compared with one process.

    cases.py        the model, the optimizers, the layouts, and which are refused
    optimizers.py   those that are written here
    training.py     trains a case on one rank, and compares the ranks' reports
    page.py         the page in the documentation

What is common with the zoo is the zoo's. ``python -m tools.optimizer_table --help`` says how to run it; a part runs
with the tests (tests/strategies/test_owners.py).
"""
