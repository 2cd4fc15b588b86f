"""``python -m tools.schedule 1f1b --stages 4``: a schedule as text, and what it costs on paper."""
