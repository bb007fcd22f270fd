"""python -m exp.fork: begin a run where another one, RUN@STEP, was at a step."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("fork")
