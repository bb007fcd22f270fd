"""Several contexts as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any


def together(contexts: Sequence[AbstractContextManager[Any]]) -> AbstractContextManager[Any] | None:
    """To be entered once; None where there are none."""
    return _together(contexts) if contexts else None


@contextmanager
def _together(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
