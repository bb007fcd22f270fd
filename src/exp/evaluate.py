"""python -m exp.evaluate: evaluate what a run saved."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("evaluate")
