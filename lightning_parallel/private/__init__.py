"""Every private name of torch and of Lightning that the package uses, with the reason why no public one does.

Tests pin each of them: when a new version breaks one, a test in ``tests/private`` fails and says what depends on it, or
a test of another room that is named there. Nothing else in the package imports or reads a private name of theirs.
"""
