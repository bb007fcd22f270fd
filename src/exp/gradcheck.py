"""python -m exp.gradcheck: check a backward of yours against numerical derivatives."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("gradcheck")
