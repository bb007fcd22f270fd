"""Secrets out of the environment: a config holds their names, and only the object that is built with one its value.

`${oc.env:HF_TOKEN}` stays as it is written in everything that is kept or shown; see docs/security.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL")
INTERPOLATION = re.compile(r"\$\{oc\.env:([^${},:]+)\}")
# Shorter ones would be found in innocent words.
MIN_REDACTED = 4
MIN_EXPOSED = 8

_shown: dict[str, str] = {}


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is a secret: HF_TOKEN, apiKey, db-password, AWS_CREDENTIALS."""
    words = re.split(r"[^A-Za-z]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name))
    return any(word.upper().removesuffix("S").endswith(WORDS) for word in words)


def interpolation(name: str) -> str:
    """What stands for the value of a variable."""
    return f"${{oc.env:{name}}}"


def reveal(text: str) -> str:
    """The text with the values of its secrets, of which `redact` knows from then on.

    Raises: LookupError where one is not set in this process.
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
    """The variable of a secret whose value stands in a text, where a shell or a person has put it; None without one."""
    return next((name for name, _ in _exposed_secrets(text)), None)


def mask_secrets(text: str) -> str:
    """The text with the names of secrets in the place of values that nobody has revealed: of a command, of a diff."""
    for name, value in sorted(_exposed_secrets(text), key=lambda found: len(found[1]), reverse=True):
        text = text.replace(value, interpolation(name))
    return text


def _exposed_secrets(text: str) -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if len(value) >= MIN_EXPOSED and value in text and is_secret(name):
            yield name, value


def has_revealed() -> bool:
    """Whether this process has used a secret of which `redact` knows."""
    return bool(_shown)


def forget() -> None:
    """Forget the secrets that this process has used."""
    _shown.clear()


def redact(text: str) -> str:
    """The text with the names of secrets in the place of the values that this process has used."""
    for value in sorted(_shown, key=len, reverse=True):
        text = text.replace(value, _shown[value])
    return text
