"""python -m exp.doctor: what the installation and the machine can do."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("doctor")
