"""python -m exp.find_batch: the largest batch that fits into memory, and the fastest."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("find_batch")
