"""LightningModules of other people's packages, each trained under every layout and compared with one process.

    entry.py, registry.py    what an entry is, and all of them; rooms/ holds entries, one file a package or kind
    layouts.py               the layouts, and what each is compared with
    training.py              trains an entry on one rank, with checkpoints, a logger and validation as users have them
    judging.py               compares the ranks' reports with one process
    page.py                  the page in the documentation

What is common with the zoo is the zoo's. ``python -m tools.others --help`` says how to run it.
"""
