"""``python -m recipes.plan``, with the words of recipes.train: which layouts fit, and what will each cost?

It plans for ``plan.devices`` with ``plan.memory`` each, in one process.
"""

import sys

from recipes import train


def main() -> None:
    """The command line."""
    words = [word for word in sys.argv if not word.startswith(("strategy", "+command="))]
    sys.argv = [*words, "+command=plan", "task_name=plan", "strategy=single"]
    train.main()


if __name__ == "__main__":
    main()
