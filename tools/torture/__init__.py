"""A kill matrix: something happens to each process of a run, at each moment, under each layout; then the run goes on.

    fault.py, model.py    the fault: a callback and a model that bring it about, in a worker of the run
    layouts.py, cases.py  the matrix, and a sample of it
    program.py            a run as a user starts it, and the processes that it has
    preloaded.py          the same without the seconds that imports take
    outcome.py            what has to hold afterwards
    runner.py             a case: the disturbed run, what is left of it, the run that goes on
    record.py, page.py    results in files, and the table in the documentation

``python -m tools.torture --help`` says how to run it.
"""
