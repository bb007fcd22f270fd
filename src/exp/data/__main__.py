"""python -m exp.data: statistics, leaks and pictures of the data."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("data")
