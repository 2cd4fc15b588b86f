"""Measurements of the strategies, side by side with what they are measured against: ``python -m tools.bench``."""
