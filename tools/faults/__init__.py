"""Faults, seeded one at a time, which ``check`` has to find and to place.

    models.py       the modules on which they bite, and the layouts
    seeding.py      puts a fault into the library or a module, on the ranks of a layout only
    faults.py       the table
    training.py     checks a module with a fault, inside a worker of the pool, and judges the report
    page.py         the page in the documentation

``python -m tools.faults --help`` says how to run it; a part runs with the tests (tests/comparison/test_beginning.py).
"""
