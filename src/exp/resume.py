"""python -m exp.resume: go on with a run."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("resume")
