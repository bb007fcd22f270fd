"""python -m exp.report: compare runs and sweeps in one HTML page."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("report")
