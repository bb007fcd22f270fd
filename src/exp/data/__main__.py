"""The command python -m exp.data.

It shows statistics of the data, samples that several splits share, and pictures.
"""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("data")
