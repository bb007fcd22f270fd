"""Secrets from environment variables. A config has their names, and only the object that needs a secret its value.

`${oc.env:HF_TOKEN}` is never resolved in files and messages; see docs/security.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL")
INTERPOLATION = re.compile(r"\$\{oc\.env:([^${},:]+)\}")
# Shorter values would match ordinary words.
MIN_REDACTED = 4
MIN_EXPOSED = 8

_shown: dict[str, str] = {}


def is_secret(name: str) -> bool:
    """Return whether a variable has the name of a secret, such as HF_TOKEN, apiKey, db-password, AWS_CREDENTIALS."""
    words = re.split(r"[^A-Za-z]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name))
    return any(word.upper().removesuffix("S").endswith(WORDS) for word in words)


def interpolation(name: str) -> str:
    """Return the interpolation of a variable's value."""
    return f"${{oc.env:{name}}}"


def reveal(text: str) -> str:
    """Return the text with the values of its secrets, and remember them for `redact`.

    Raises:
        LookupError: A variable is not set in this process.
    """

    def value_of(found: re.Match[str]) -> str:
        name = found[1].strip()
        if not is_secret(name):
            return found[0]
        if name not in os.environ:
            raise LookupError(f"{found[0]}, and {name} is not set in this process")
        value = os.environ[name]
        if len(value) >= MIN_REDACTED:
            _shown[value] = interpolation(name)
        return value

    return INTERPOLATION.sub(value_of, text)


def find_exposed(text: str) -> str | None:
    """Return the variable of a secret whose value is in a text, for example because a shell put it there, or None."""
    return next((name for name, _ in _exposed_secrets(text)), None)


def mask_secrets(text: str) -> str:
    """Replace values of secrets by their names in a text that exp did not write, such as a command or a diff."""
    for name, value in sorted(_exposed_secrets(text), key=lambda found: len(found[1]), reverse=True):
        text = text.replace(value, interpolation(name))
    return text


def _exposed_secrets(text: str) -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if len(value) >= MIN_EXPOSED and value in text and is_secret(name):
            yield name, value


def has_revealed() -> bool:
    """Return whether this process has used a secret."""
    return bool(_shown)


def forget() -> None:
    """Forget the secrets that this process has used."""
    _shown.clear()


def redact(text: str) -> str:
    """Replace the values of secrets that this process has used by their names."""
    for value in sorted(_shown, key=len, reverse=True):
        text = text.replace(value, _shown[value])
    return text
