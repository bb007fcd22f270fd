"""python -m exp.plan: layers, memory of each rank and time of a step, before a run."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("plan")
