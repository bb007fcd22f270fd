"""The command python -m exp.precision, which compares a precision with float32 on a batch, layer by layer."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("precision")
