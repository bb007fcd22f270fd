"""python -m exp.doctor: check the installation and the machine."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("doctor")
