"""python -m exp.diff: what two runs have of different config, code and results."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("diff")
