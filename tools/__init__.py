"""What makes the pages: measurements, studies and pictures. It runs from the checkout and is not installed.

Imports go from here to :mod:`recipes` and :mod:`lightning_parallel`, never back.
"""
