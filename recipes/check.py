"""``python -m recipes.check``, with the words of recipes.train: has a layout one process's numbers on this model?

It compares in float64, unless ``trainer.precision`` is given.
"""

import sys

from recipes import train


def main() -> None:
    """The command line."""
    given = any(word.startswith("trainer.precision=") for word in sys.argv)
    sys.argv += ["+command=check", "task_name=check", *([] if given else ["trainer.precision=64-true"])]
    train.main()


if __name__ == "__main__":
    main()
