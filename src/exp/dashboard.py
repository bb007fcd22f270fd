"""python -m exp.dashboard: TensorBoard for outputs/, a sweep or a run."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("dashboard")
