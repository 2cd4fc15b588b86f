"""What makes the pages: measurements, studies and pictures. It runs from the checkout and is not installed.

Imports go from here to :mod:`recipes` and :mod:`lightning_parallel`, never back.
"""

# What generated evidence begins with: the site's search, for which it would outweigh the guides, leaves it out.
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---"
