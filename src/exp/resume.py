"""python -m exp.resume: resume a run."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("resume")
