"""python -m exp.predict: predict new samples with a trained network."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("predict")
