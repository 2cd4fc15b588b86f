"""``python -m lightning_parallel.pipeline`` draws a schedule."""

from lightning_parallel.pipeline.simulate import main

if __name__ == "__main__":
    main()
