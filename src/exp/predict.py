"""python -m exp.predict: what a trained network says of new samples."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("predict")
