"""The command python -m exp.data, which shows statistics, leaks between splits, and pictures of the data."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("data")
