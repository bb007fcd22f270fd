"""Command python -m exp.check: report the errors of a config without training."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("check")
