"""python -m exp.audit: show what a downloaded config or checkpoint would do."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("audit")
