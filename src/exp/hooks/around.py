"""The contexts of several hooks around one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from exp.hooks.hook import Hook, Step


def around(hooks: Sequence[Hook], step: Step) -> AbstractContextManager[Any] | None:
    """The hooks' contexts as one, to be entered once; None where they have none."""
    contexts = [context for hook in hooks if (context := hook.around_forward(step)) is not None]
    return _together(contexts) if contexts else None


@contextmanager
def _together(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
