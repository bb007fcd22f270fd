"""python -m exp.data: look at the data: figures, leaks, pictures."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("data")
