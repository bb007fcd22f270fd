"""python -m exp.precision: compare the outputs of each layer in a precision with float32, for one batch."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("precision")
