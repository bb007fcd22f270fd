"""The command `python -m exp.plan`, which estimates the layers, memory and step time of a run before it starts."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("plan")
