"""python -m exp.check: what is wrong with a config; train nothing."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("check")
