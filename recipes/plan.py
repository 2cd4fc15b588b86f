"""``python -m recipes.plan``, with the words of recipes.train: the layouts that fit, and what each will cost."""

import sys

from recipes import train


def main() -> None:
    """The command line."""
    words = [word for word in sys.argv if not word.startswith(("strategy", "+command="))]
    sys.argv = [*words, "+command=plan", "task_name=plan", "strategy=single", "print_config=false"]
    train.main()


if __name__ == "__main__":
    main()
