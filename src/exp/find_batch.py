"""python -m exp.find_batch: find the largest and the fastest batch that fit into memory."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("find_batch")
