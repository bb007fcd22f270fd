"""The .env file of the working directory: environment variables for the configs, such as EXP_DATA_DIR."""

from __future__ import annotations

import functools
import sys
from pathlib import Path


def load_env_file() -> None:
    """Sets the variables of ./.env that are not set yet. Without python-dotenv it says how to install it."""
    path = Path.cwd() / ".env"
    if path.is_file():
        _load(path, path.stat().st_mtime_ns)


# Once for each version of the file: a sweep composes many jobs, and none may bring back what a job unset.
@functools.cache
def _load(path: Path, _changed: int) -> None:
    try:
        import dotenv
    except ImportError:
        print("exp: .env is not read, python-dotenv is missing: pip install 'exp-framework[env]'", file=sys.stderr)
        return
    dotenv.load_dotenv(path, override=False)
