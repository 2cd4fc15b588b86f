"""Every private name of Lightning and torchmetrics that the package uses, with the reason why no public one does.

``tests/test_lightning_private.py`` pins each of them: when a new version of Lightning breaks one, a test there fails
and says what depends on it. Nothing else in the package imports or reads a private name of Lightning.
"""
