"""python -m exp.serve: a saved network over HTTP, on this machine."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("serve")
