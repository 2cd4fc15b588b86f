"""Models written by hand, each with something that a strategy could trip over."""
