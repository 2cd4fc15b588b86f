"""What makes the pages: measurements, studies, pictures, and tables of what trains under which layout. It runs from the
checkout and is not installed.

Imports go from here to :mod:`recipes` and :mod:`lightning_parallel`, never back. The tests of these programs, and the
samples of their tables that are tests, are in ``tests/``.
"""

# What generated evidence begins with: the site's search, for which it would outweigh the guides, leaves it out.
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---"
