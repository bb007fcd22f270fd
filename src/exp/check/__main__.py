"""python -m exp.check: report the errors of a config; train nothing."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("check")
