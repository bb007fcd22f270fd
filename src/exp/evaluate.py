"""python -m exp.evaluate: evaluate a saved run."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("evaluate")
