"""python -m exp.schema: JSON schemas, by which an editor completes YAML."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("schema")
