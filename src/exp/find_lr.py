"""python -m exp.find_lr: a learning rate, by a range test."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("find_lr")
