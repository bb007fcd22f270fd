"""python -m exp.diff: compare config, code and results of two runs."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("diff")
