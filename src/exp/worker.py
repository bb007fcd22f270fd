"""python -m exp.worker: one rank of a frozen run, for torchrun and SLURM."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("worker")
