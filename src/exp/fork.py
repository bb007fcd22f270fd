"""python -m exp.fork: start a run from a step of another run, RUN@STEP."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("fork")
