"""What a logger cannot show is said once, by name, and never dropped in silence."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from exp.hooks.values import Panel

log = logging.getLogger(__name__)


class LeftOut:
    """Picks the panels that a logger can show, and says which kinds it cannot, each once.

    name: the logger's, as in the config. kinds: those that it can show.
    """

    def __init__(self, *, name: str, kinds: tuple[type[Panel], ...]) -> None:
        self._name = name
        self._kinds = kinds
        self._said: set[type[Panel]] = set()

    def shown(self, panels: Mapping[str, Panel]) -> dict[str, Panel]:
        shown = {}
        for tag, panel in panels.items():
            if isinstance(panel, self._kinds):
                shown[tag] = panel
            elif type(panel) not in self._said:
                self._said.add(type(panel))
                kind = type(panel).__name__
                log.warning("logger %s cannot show a %s: %s and its like are left out", self._name, kind, tag)
        return shown
