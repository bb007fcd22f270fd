"""Run `python -m exp COMMAND ...`, which is equivalent to `exp COMMAND ...`."""

import sys

from exp.cli.dispatch import main

if __name__ == "__main__":
    sys.exit(main())
