"""python -m exp.precision: compare a precision with float32, layer by layer, on one batch."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("precision")
