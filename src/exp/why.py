"""python -m exp.why: show the file, group or override that set a key."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("why")
