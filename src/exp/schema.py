"""python -m exp.schema: JSON schemas for editors that complete YAML."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("schema")
