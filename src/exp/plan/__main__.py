"""python -m exp.plan: what a run takes: layers, memory of each rank, time of a step."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("plan")
