"""python -m exp.why KEY [overrides]: which file, group, override or interpolation gave a key its value.

python -m exp.why optimizer.lr model=mlp optimizer=sgd        every layer that set it, the one that counts last
python -m exp.why hooks debug=overfit                         what is below it, with the place of each value
python -m exp.why data.num_classes data=wine                  what the data filled in
python -m exp.why seed run=outputs/train/2026-01-31/12-00-00  of a run that is there
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from exp.check.stages import allowed, compose
from exp.cli.command_line import answer_question, is_question, parse_arguments
from exp.config.freeze import COMPOSITION, frozen_values, read_overrides
from exp.config.grammar import parse_override
from exp.config.groups import COMMAND_LINE
from exp.config.habits import cure_of_key
from exp.config.hydra_adapter import Layer
from exp.config.module_key import REPLACED, has_module
from exp.config.plain_tree import is_node, leaves
from exp.config.reading import ENVIRONMENT, REFERENCE, UNKNOWN, read
from exp.config.search_path import shown as shown_path
from exp.config.sources import REMOVED, Setting, above, history_of, layers_of
from exp.config.yaml_files import position_of, read_yaml, split
from exp.errors import ConfigError, ExpError, Fault
from exp.output import exit_status
from exp.redaction import covered, is_secret, redacted
from exp.spelling import among, nearest, show

PROGRAM = "python -m exp.why"
RUN = "run="
# Of a value in a table.
MOST_CHARACTERS = 60
# A run determines these keys before it begins.
DETERMINED = ("data.", "resume", "weights.from")
RESOLVER = re.compile(r"\$\{[\w.]+:[^${}]*\}")
MOST_STEPS = 40
Row = tuple[str, str, str]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the value of a key and the layers that set it. Train nothing and write nothing.

    Returns:
        0, or 2 if the key does not exist or the command line has an error.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv))


def _command(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    arguments = parse_arguments(argv, program=PROGRAM)
    if is_question(arguments):
        answer_question(arguments)
        return 0
    key, overrides = _key(arguments.overrides)
    runs = [text for text in overrides if text.startswith(RUN)]
    if runs:
        question = _question_of_run(runs, [text for text in overrides if text not in runs])
    else:
        config = compose(overrides, config_dir=arguments.config_dir, config_name=arguments.config_name)
        question = Question(config, typed=overrides)
    for line in question.answer(key):
        print(redacted(line))
    return 0


def _key(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the key and the overrides. Raise ConfigError unless there is exactly one key."""
    keys = [word for word in words if "=" not in word and not word.startswith("~")]
    if len(keys) != 1:
        got = f"{', '.join(keys)}: {len(keys)} keys" if keys else f"{' '.join(words)}: overrides alone"
        raise _error(got, "one dotted key, and overrides next to it", f"{PROGRAM} optimizer.lr model=mlp")
    return ".".join(split(keys[0])), [word for word in words if word != keys[0]]


def _error(got: str, expected: str, cure: str | None = None, *, key: str = "KEY") -> ConfigError:
    return ConfigError([Fault(key=key, got=got, expected=expected, cure=cure, source=COMMAND_LINE)])


def _question_of_run(runs: Sequence[str], others: Sequence[str]) -> Question:
    """Return the question about a run. Its command is composed from the files of today."""
    directory = Path(runs[0].removeprefix(RUN))
    if others or len(runs) > 1:
        got = f"{' '.join([*runs[1:], *others])} next to it"
        raise _error(got, "run=DIR alone", f"Write from_run={directory}, which takes others", key="run")
    if not (directory / "config.yaml").is_file():
        expected = "a run directory, such as outputs/train/2026-01-31/12-00-00"
        raise _error(f"{directory}, which holds no config.yaml", expected, key="run")
    frozen = frozen_values(directory)
    try:
        overrides = read_overrides(directory)
        return Question(compose(overrides), typed=overrides, run=directory, frozen=frozen)
    except (ExpError, OSError) as error:
        why = str(error).strip().splitlines()[-1].strip()
        note = f"(what set it is not known: the run's command does not compose today. {why})"
        return Question(OmegaConf.create({}), typed=(), run=directory, frozen=frozen, note=note)


class Question:
    """A config whose values are explained.

    Args:
        config: As composed today.
        typed: The overrides of the command.
        run: The directory of a run.
        frozen: The values in the run's config.yaml.
        note: The first line of each answer.
    """

    def __init__(
        self,
        config: DictConfig,
        *,
        typed: Sequence[str],
        run: Path | None = None,
        frozen: Mapping[str, Any] | None = None,
        note: str | None = None,
    ) -> None:
        self._config, self._typed, self._run, self._note = config, typed, run, note
        raw = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False, throw_on_missing=False))
        raw.pop(COMPOSITION, None)
        self._plain = {name: value for name, value in read(config)[0].items() if name in raw}
        self._raw, self._today = dict(leaves(raw)), dict(leaves(self._plain))
        self._values = self._today if frozen is None else dict(leaves(dict(frozen)))

    def answer(self, key: str) -> Iterator[str]:
        """Yield the lines about a key. Raise ConfigError if it does not exist."""
        if self._note is not None:
            yield self._note
        tree = self._raw if self._run is None else self._values
        held = next((one for one in above(key) if REFERENCE.fullmatch(str(self._raw.get(one)))), None)
        if key not in tree and held is not None:  # such as `${model}` instead of a node
            there = _whole(self._raw[held][2:-1], held) + key.removeprefix(held)
            yield f"{held} is {self._raw[held]}, so {key} is {there}:"
            yield from self.answer(there)
        elif key not in tree:
            yield from self._absent(key)
        elif _has_entries(tree[key]):
            yield f"{key}:"
            for layer in layers_of(self._config) if self._raw else ():
                chosen_by = self._reason(layer)
                if ".".join(split(layer.package)) == key and chosen_by is not None:
                    yield f"  {layer.config_path}, by {chosen_by}"
            yield from _table([self._summary(*one) for one in _values_below(tree, key)])
        else:
            value, notes = self._value(key)
            yield f"{key} = {shown(value)}"
            yield from _table([self._row(one, key) for one in history_of(self._config, key)])
            yield from islice(self._steps(key), MOST_STEPS)
            yield from notes

    def _value(self, key: str) -> tuple[Any, list[str]]:
        """Return the final value, and notes about it."""
        today = self._today.get(key, UNKNOWN)
        is_open = today is UNKNOWN or (key.startswith(DETERMINED) and today in (None, "auto"))
        if self._run is None:
            return self._determined(key, today) if is_open else (today, [])
        then = self._values[key]
        if is_open and then is not None:
            return then, [f"  found out before the run, and kept in {self._run}/config.yaml"]
        if key not in self._today or today == then:
            return then, []
        return then, [f"  in {self._run}/config.yaml; the same command gives {shown(today)} today"]

    def _determined(self, key: str, today: Any) -> tuple[Any, list[str]]:
        """Return a value that the data, or a search before the run, determine."""
        from exp.check.resolution import resolve  # which imports torch

        decided = resolve(self._config)
        value = dict(leaves(decided.plain)).get(key, UNKNOWN)
        if value is UNKNOWN or value == today:
            faults = [f"  not known until this is fixed: {fault}" for fault in decided.faults[:3]]
            return today, faults or (["  not known before the run"] if value is UNKNOWN else [])
        is_of_data = key.startswith("data.") or today is UNKNOWN
        who = f"the data, {decided.plain['data']['_target_']}," if is_of_data else "the search for it before the run"
        return value, [f"  {who} filled in {shown(value)}"]

    def _row(self, one: Setting, key: str) -> Row:
        if one.value is REMOVED:
            value = "(taken away)"
        elif one.key == key:
            value = shown(one.value)
        else:
            value = "(the whole node anew)" if isinstance(one.value, Mapping) else f"({one.key} is {shown(one.value)})"
        if one.layer is None:
            return self._place(one), value, covered(one.text)
        chosen_by = self._reason(one.layer)
        return self._place(one), value, "" if chosen_by is None else f"{one.layer.config_path}, by {chosen_by}"

    def _summary(self, key: str, written: Any) -> Row:
        value = self._values.get(key, UNKNOWN)
        text = shown(written if value is UNKNOWN else value)
        if _is_interpolation(written) and value is not UNKNOWN:
            text = f"{shown(written)} = {text}"
        return key, text, self._last_place(key)

    def _place(self, one: Setting) -> str:
        if one.file is not None:
            return _place_of(one.file, one.keys)
        if self._run is not None:
            return f"{self._run}/overrides.yaml"
        return COMMAND_LINE if one.text in self._typed else "from_run"

    def _last_place(self, key: str) -> str:
        settings = history_of(self._config, key)
        return self._place(settings[-1]) if settings else ""

    def _steps(self, key: str, trail: tuple[str, ...] = ()) -> Iterator[str]:
        """Yield each reference of an interpolation, followed by the references of its value. A circle ends."""
        text = self._raw.get(key)
        if not isinstance(text, str) or key in trail:
            return
        indent = "  " * (len(trail) + 1)
        for match in REFERENCE.finditer(text):
            there = _whole(match[1], key)
            place = self._last_place(there)
            found = f"{there} is {shown(self._raw[there])}" if there in self._raw else f"there is no {there}"
            yield f"{indent}{match[0]}: {found}{f'  [{place}]' if place else ''}"
            yield from self._steps(there, (*trail, key))
        for match in RESOLVER.finditer(text):
            yield f"{indent}{match[0]}{_variable(match[0])}"

    def _reason(self, layer: Layer) -> str | None:
        """Return the override, or the place of the line of a defaults list, that chose an option of a group."""
        group, _, option = layer.config_path.rpartition("/")
        for text in reversed(self._config[COMPOSITION].overrides):
            parsed = parse_override(text)
            value = None if parsed.is_delete() else parsed.value()
            if group and parsed.key_or_group == group and option in (value if isinstance(value, list) else [value]):
                return f"{covered(text)}{f' in {self._run}/overrides.yaml' if self._run else ', command line'}"
        lines = [line for one in layers_of(self._config) for line in _choices(one) if line[0] == layer.config_path]
        # An `override` line has precedence over the list that it changes.
        chosen = next(iter([line for line in reversed(lines) if line[1]] or lines[::-1]), None)
        return None if chosen is None or not group else chosen[2]

    def _absent(self, key: str) -> Iterator[str]:
        settings = history_of(self._config, key)
        parent, _, name = key.rpartition(".")
        top = key.partition(".")[0]
        holder: Any = self._values.get(parent)
        if settings and top != "hydra":
            yield f"{key}: not there any more"
            yield from _table([self._row(one, key) for one in settings])
        elif top in REPLACED and has_module(self._plain):
            yield f"{key}: left out, for {self._plain['module']['_target_']} brings its own: {REPLACED[top][1]}"
        elif is_node(holder) and cure_of_key(key, "") is None and (default := self._default(holder, name)) is not None:
            yield f"{key} = {default}"
            yield f"  nobody set it: it is the default of {holder['_target_']}"
        else:
            raise self._unknown(key)

    def _default(self, holder: Any, name: str) -> str | None:
        """Return the default of a parameter of a node's target; None if the target has no such parameter."""
        from exp.check.signature import signature_of  # imports the target
        from exp.config.targets import resolve

        try:
            target = resolve(holder["_target_"], returns=("builtins.object",), allow=allowed(self._plain))
        except ExpError:
            return None  # the check reports it
        parameter = signature_of(target).parameters.get(name)
        if parameter is None:
            return None
        return "(must be given)" if parameter.default is inspect.Parameter.empty else shown(parameter.default)

    def _unknown(self, key: str) -> ConfigError:
        if key.partition(".")[0] == "hydra":
            return _error("a key of Hydra", "a key of the run", "See python -m exp.train --cfg hydra", key=key)
        parent, _, name = key.rpartition(".")
        holder = self._values.get(parent)
        siblings = list(map(str, holder)) if isinstance(holder, Mapping) else []
        elsewhere = [one for one in self._values if one.rpartition(".")[2] == name]
        near = [f"{parent}.{one}" for one in nearest(name, siblings)]
        near = nearest(key, elsewhere, likeness=0.0) or near or nearest(key, list(self._values))
        cure = cure_of_key(key, "VALUE") or (f"Did you mean {near[0]}?" if near else None)
        known = siblings or [one for one in self._values if "." not in one]
        return _error("there is no such key", f"one of {among(known, word=name)}", cure, key=key)


def _has_entries(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _values_below(tree: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    """Yield the values below a key, lists as a whole."""
    for one, value in tree.items():
        is_in_list = any(isinstance(tree[holder], list) for holder in above(one) if holder in tree)
        if one.startswith(f"{key}.") and not _has_entries(value) and not is_in_list:
            yield one, value


def _choices(layer: Layer) -> Iterator[tuple[str, bool, str]]:
    """Yield the options that the defaults list of a file chooses, whether by `override`, and the place of the line."""
    content = None if layer.file is None else read_yaml(layer.file)
    folder = layer.config_path.rpartition("/")[0]
    for number, line in enumerate(content.get("defaults", ()) if isinstance(content, Mapping) else ()):
        for key, value in line.items() if isinstance(line, Mapping) else [("", line)]:
            group = str(key).removeprefix("override ").removeprefix("optional ").partition("@")[0]
            for option in value if isinstance(value, list) else [value]:
                path = f"{group}/{option}".partition("@")[0] if group else str(option).partition("@")[0]
                path = path.lstrip("/") if path.startswith("/") or not folder else f"{folder}/{path}"
                yield (
                    path,
                    str(key).startswith("override "),
                    _place_of(cast(Path, layer.file), ("defaults", str(number))),
                )


def _place_of(file: Path, keys: Sequence[str]) -> str:
    """Return a file and the line in which the value under nested keys begins, `conf/optimizer/adamw.yaml:3`."""
    found = position_of(file, keys)
    return shown_path(file) if found is None else f"{found.file}:{found.line}"


def _is_interpolation(value: object) -> bool:
    return isinstance(value, str) and "${" in value


def _whole(reference: str, at: str) -> str:
    """Return the dotted key that a reference such as `.lr` or `..seed` means in the value of a key."""
    dots = len(reference) - len(reference.lstrip("."))
    if not dots:
        return reference.strip()
    parts = split(at)
    return ".".join([*parts[: max(len(parts) - dots, 0)], reference[dots:].strip()])


def _variable(text: str) -> str:
    """Return what an interpolation such as `${oc.env:HOME}` reads in the environment."""
    named = ENVIRONMENT.match(text)
    if named is None:
        return ""
    name = named[1].strip()
    if name not in os.environ:
        return f": the environment has no {name}"
    return f": {name} is set" if is_secret(name) else f": {name} is {os.environ[name]!r}"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    for first, second, third in rows:
        yield f"  {first:<{widths[0]}}  {second:<{widths[1]}}  {third}".rstrip()


def shown(value: Any) -> str:
    """Return a value in one line, as in YAML."""
    if isinstance(value, str):
        text = value if value and "\n" not in value and value == value.strip() else repr(value)
    elif isinstance(value, Mapping):
        text = f"{{{', '.join(f'{name}: {shown(inner)}' for name, inner in value.items())}}}"
    elif isinstance(value, list | tuple):
        text = f"[{', '.join(map(shown, value))}]"
    else:
        text = "(not known yet)" if value is UNKNOWN else show(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."
