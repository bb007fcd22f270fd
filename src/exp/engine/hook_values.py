"""What a hook gives to be logged, held to tags of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exp.errors import RunError
from exp.hooks.hook import Hook

# The first words of tags that the engine writes itself.
ENGINE_TAGS = ("loss", "optimizer", "precision")


def given(
    hook: Hook, method: str, arguments: tuple[Any, ...], *, owners: dict[str, Hook], ending: str = ""
) -> Mapping[str, Any]:
    """What a method of a hook returns, by tag.

    owners: whose each tag is, in which new ones are entered. ending: is added to each tag.
    Raises: RunError where it is no mapping, or a tag is another's; whatever the method raises, with the hook's name.
    """
    try:
        found = getattr(hook, method)(*arguments)
    except Exception as error:
        error.add_note(f"raised in hooks.{hook.name}, by {type(hook).__name__}.{method}")
        raise
    if not found:
        return {}
    if not isinstance(found, Mapping):
        raise RunError(
            f"hooks.{hook.name}: {type(hook).__name__}.{method} returned a {type(found).__name__}; expected a mapping "
            "of tags to values, or None"
        )
    if ending:
        found = {tag + ending: value for tag, value in found.items()}
    for tag in found:
        owner = owners.get(tag)
        if owner is not hook:
            _enter(tag, hook, owner, owners)
    return found


def _enter(tag: str, hook: Hook, owner: Hook | None, owners: dict[str, Hook]) -> None:
    if owner is not None or tag.partition("/")[0] in ENGINE_TAGS:
        whose = "the engine's own" if owner is None else f"given by hooks.{owner.name}, too"
        raise RunError(f"hooks.{hook.name} gives {tag}, which is {whose}; expected a tag of its own. Rename it")
    owners[tag] = hook
