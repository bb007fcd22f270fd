"""python -m exp.audit: what a config or a checkpoint from elsewhere would do."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("audit")
