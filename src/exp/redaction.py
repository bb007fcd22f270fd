"""Functions that keep the values of secret environment variables out of files and messages.

A config contains only the name of a secret, as `${oc.env:HF_TOKEN}`. The interpolation is resolved only for the object
that needs the secret, never in files and messages. See docs/security.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL")
INTERPOLATION = re.compile(r"\$\{oc\.env:([^${},:]+)\}")
# Minimum lengths of a secret value that `redact` and `mask_secrets` replace in texts. Shorter values would match
# ordinary words.
MIN_REDACTED = 4
MIN_EXPOSED = 8

_shown: dict[str, str] = {}


def is_secret(name: str) -> bool:
    """Return whether the name of a variable indicates a secret, such as HF_TOKEN, apiKey or db-password."""
    words = re.split(r"[^A-Za-z]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name))
    return any(word.upper().removesuffix("S").endswith(WORDS) for word in words)


def interpolation(name: str) -> str:
    """Return the interpolation of an environment variable, `${oc.env:NAME}`."""
    return f"${{oc.env:{name}}}"


def reveal(text: str) -> str:
    """Return a text in which each interpolation of a secret is replaced by the value of the secret.

    The values are recorded in this process, so that `redact` can replace them in other texts.

    Raises:
        LookupError: The environment variable of a secret is not set in this process.
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
    """Return the name of a secret environment variable if a text contains the variable's value; otherwise None.

    For example, a command line contains the value of a secret if the shell has expanded `$HF_TOKEN`.
    """
    return next((name for name, _ in _exposed_secrets(text)), None)


def mask_secrets(text: str) -> str:
    """Return a text in which the value of each secret environment variable is replaced by `${oc.env:NAME}`.

    This function is for texts that exp did not write, such as a command or a diff.
    """
    for name, value in sorted(_exposed_secrets(text), key=lambda found: len(found[1]), reverse=True):
        text = text.replace(value, interpolation(name))
    return text


def _exposed_secrets(text: str) -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if len(value) >= MIN_EXPOSED and value in text and is_secret(name):
            yield name, value


def has_revealed() -> bool:
    """Return whether `reveal` has replaced a secret by its value in this process."""
    return bool(_shown)


def forget() -> None:
    """Discard the values that `reveal` has recorded."""
    _shown.clear()


def redact(text: str) -> str:
    """Return a text in which each value that `reveal` has recorded is replaced by its interpolation."""
    for value in sorted(_shown, key=len, reverse=True):
        text = text.replace(value, _shown[value])
    return text
