"""python -m exp.why: which file, group or override gave a key its value."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("why")
