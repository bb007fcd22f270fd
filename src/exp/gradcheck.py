"""python -m exp.gradcheck: whether a backward of your own is the derivative of its forward."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("gradcheck")
