"""``python -m tools.study``: what a choice of the pipelines costs in quality, by training many small models."""
