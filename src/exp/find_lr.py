"""python -m exp.find_lr: suggest a learning rate from a range test."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("find_lr")
