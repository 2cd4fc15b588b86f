"""``python -m recipes.compare``: one model and its data under several strategies, side by side, in figures."""
