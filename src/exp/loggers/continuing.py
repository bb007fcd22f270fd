"""What a logger of a foreign store keeps in the run directory, so that a resume goes on in the same place there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exp.errors import RunError
from exp.files import write_whole


class Notes:
    """A small JSON file of plain values: whose run this is in the store, and how far it was written.

    Raises RunError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        if path.is_file():
            try:
                self.values = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise RunError(
                    f"{path} cannot be read: {error}; without it the logger begins a new run there"
                ) from error

    def keep(self, **values: Any) -> None:
        self.values.update(values)
        try:
            write_whole(self.path, json.dumps(self.values) + "\n")
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror or error}") from error
