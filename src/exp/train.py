"""python -m exp.train: one run, or with -m a sweep."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("train")
