"""A zoo of small models as users bring them, each trained under many layouts and compared with one process.

    entry.py, registry.py    what an entry is, and all of them; the other files hold entries, one file a library
    layouts.py               the layouts, and what each is compared with
    training.py              trains an entry on one rank, in a worker of the pool
    outcome.py               compares the ranks' reports with one process: equal, refused, different, ...
    runner.py                every entry under every layout
    program.py               the arguments, and runs that can be resumed
    page.py                  the table in the documentation

``python -m tools.zoo --help`` says how to run it, and CONTRIBUTING.md how to add a model.
"""
