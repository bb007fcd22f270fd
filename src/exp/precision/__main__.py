"""python -m exp.precision: what a precision does to each layer of a network, on one batch."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("precision")
