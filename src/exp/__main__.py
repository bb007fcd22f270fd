"""exp COMMAND ...: every command of exp. `python -m exp COMMAND ...` is the same."""

import sys

from exp.cli.dispatch import main

if __name__ == "__main__":
    sys.exit(main())
