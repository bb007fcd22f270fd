"""Secrets out of the environment: a config holds their names, and only the object that is built with one its value.

`${oc.env:HF_TOKEN}` stays as it is written in everything that is kept or shown; see docs/security.md.
"""

from __future__ import annotations

import os
import re

WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL")
INTERPOLATION = re.compile(r"\$\{oc\.env:([^${},:]+)\}")
# Shorter ones would be found in innocent words.
MIN_REDACTED = 4

_shown: dict[str, str] = {}


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is a secret: HF_TOKEN, apiKey, db-password, AWS_CREDENTIALS."""
    words = re.split(r"[^A-Za-z]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name))
    return any(word.upper().removesuffix("S").endswith(WORDS) for word in words)


def interpolation(name: str) -> str:
    """What stands for the value of a variable."""
    return f"${{oc.env:{name}}}"


def revealed(text: str) -> str:
    """The text with the values of its secrets, of which `redacted` knows from then on.

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


def were_revealed() -> bool:
    """Whether this process has used a secret of which `redacted` knows."""
    return bool(_shown)


def redacted(text: str) -> str:
    """The text with the names of secrets in the place of the values that this process has used."""
    for value in sorted(_shown, key=len, reverse=True):
        text = text.replace(value, _shown[value])
    return text
