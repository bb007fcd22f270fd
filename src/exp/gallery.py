"""python -m exp.gallery: the experiments that come with exp."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("gallery")
