"""python -m exp.why KEY [overrides]: which file, group, override or interpolation gave a key its value.

python -m exp.why optimizer.lr model=mlp optimizer=sgd        every layer that set it, the one that counts last
python -m exp.why hooks debug=overfit                         what is below it, with the place of each value
python -m exp.why data.num_classes data=wine                  what the data filled in
python -m exp.why seed run=outputs/train/2026-01-31/12-00-00  of a run that is there
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from exp.check.stages import compose
from exp.config.command import answer_question, is_question, parse_arguments
from exp.config.freeze import frozen_values, read_overrides
from exp.config.habits import cure_of_key
from exp.config.history import NOWHERE, Setting, found_in, history_of, layers_of, raw_of, reason_of
from exp.config.module_key import REPLACED, has_module
from exp.config.plain_tree import is_node
from exp.config.reading import UNKNOWN, read
from exp.config.resolution import is_interpolation, steps_of
from exp.config.yaml_files import split
from exp.errors import ConfigError, ExpError, Fault
from exp.output import exit_status
from exp.redaction import covered, redacted
from exp.spelling import among, nearest, show

PROGRAM = "python -m exp.why"
RUN = "run="
# Of a value in a table.
MOST_CHARACTERS = 60
# What a run asks for before it begins, by the beginning of the key.
ASKED = ("data.", "resume", "weights.from")


def main(argv: Sequence[str] | None = None) -> int:
    """Print a key's value and how it came about. Trains nothing, and writes nothing.

    Returns: 0; 2 where there is no such key, or the command line has a fault.
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
        question = _of_run(runs, [text for text in overrides if text not in runs])
    else:
        config = compose(overrides, config_dir=arguments.config_dir, config_name=arguments.config_name)
        question = Question(config=config, typed=overrides)
    for line in question.answer(key):
        print(redacted(line))
    return 0


def _key(words: Sequence[str]) -> tuple[str, list[str]]:
    """The key, and the overrides. Raises: ConfigError."""
    keys = [word for word in words if "=" not in word and not word.startswith("~")]
    if len(keys) != 1:
        got = f"{', '.join(keys)}: {len(keys)} keys" if keys else f"{' '.join(words)}: overrides alone"
        raise ConfigError([_fault(got, "one dotted key, and overrides beside it", f"{PROGRAM} optimizer.lr model=mlp")])
    return keys[0].strip("."), [word for word in words if word != keys[0]]


def _fault(got: str, expected: str, cure: str | None = None, *, key: str = "KEY") -> Fault:
    return Fault(key=key, got=got, expected=expected, cure=cure, source="command line")


def _of_run(runs: Sequence[str], others: Sequence[str]) -> Question:
    """The question to a run, whose command is composed as the files are today. Raises: ConfigError, RunError."""
    directory = Path(runs[0].removeprefix(RUN))
    if others or len(runs) > 1:
        got = f"beside {' '.join([*runs[1:], *others])}"
        cure = f"Write from_run={directory}, which takes others"
        raise ConfigError([_fault(got, "run=DIR alone, for a run is what it was", cure, key="run")])
    if not (directory / "config.yaml").is_file():
        expected = "a run directory, such as outputs/train/2026-01-31/12-00-00"
        raise ConfigError([_fault(f"{directory}, which holds no config.yaml", expected, key="run")])
    frozen = frozen_values(directory)
    try:
        overrides = read_overrides(directory)
        config = compose(overrides)
    except (ExpError, OSError) as error:
        why = str(error).strip().splitlines()[-1].strip()
        note = f"(what set it is not known: the run's command does not compose today. {why})"
        return Question(config=OmegaConf.create({}), typed=(), run=directory, frozen=frozen, notes=[note])
    return Question(config=config, typed=overrides, run=directory, frozen=frozen)


class Question:
    """A config that is asked how its values came about.

    config: as composed today. typed: the overrides of the command.
    run, frozen: of a run, its directory and the values of its config.yaml. notes: to be said first.
    """

    def __init__(
        self,
        *,
        config: DictConfig,
        typed: Sequence[str],
        run: Path | None = None,
        frozen: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._config, self._typed, self._run, self._notes = config, typed, run, notes
        self._raw = raw_of(config)
        self._today = {name: value for name, value in read(config)[0].items() if name in self._raw}
        self._values = self._today if frozen is None else frozen

    def answer(self, key: str) -> Iterator[str]:
        """The lines on a key. Raises: ConfigError where there is none."""
        yield from self._notes
        parts = split(key)
        tree = self._raw if self._run is None else self._values
        value, names = found_in(tree, parts)
        reference = self._node_reference(parts) if value is NOWHERE else None
        if reference is not None:
            held, text, there = reference
            yield f"{held} is {text}, so {key} is {there}:"
            yield from self.answer(there)
        elif value is NOWHERE:
            yield from self._absent(key)
        elif isinstance(value, Mapping) and value:
            yield f"{key}:"
            yield from self._choices(parts)
            yield from _table(list(self._rows_below(names, value)))
        else:
            yield from self._leaf(".".join(names), parts)

    def _node_reference(self, parts: Sequence[str]) -> tuple[str, str, str] | None:
        """The key that holds `${model}` in the place of a node, that text, and the key that is meant within it."""
        for count in range(len(parts) - 1, 0, -1):
            value, names = found_in(self._raw, parts[:count])
            if is_interpolation(value):
                held = ".".join(names)
                first = steps_of(self._raw, held, value)[0]
                if first.key is not None and first.text == value:
                    return held, value, ".".join([first.key, *parts[count:]])
        return None

    # --- one value ---

    def _leaf(self, key: str, parts: Sequence[str]) -> Iterator[str]:
        written, _ = found_in(self._raw, parts)
        value, notes = self._value(key, parts)
        yield f"{key} = {shown(value)}"
        yield from _table([self._row(one) for one in history_of(self._config, key)])
        if is_interpolation(written):
            yield from self._steps(key, written)
        yield from notes

    def _value(self, key: str, parts: Sequence[str]) -> tuple[Any, list[str]]:
        """The value in the end, and what is to be said of it."""
        today, _ = found_in(self._today, parts)
        is_open = today is UNKNOWN or (key.startswith(ASKED) and (today is None or today == "auto"))
        if self._run is not None:
            then, _ = found_in(self._values, parts)
            if is_open and then is not None:
                return then, [f"  found out before the run, and kept in {self._run}/config.yaml"]
            if today is NOWHERE or today == then:
                return then, []
            return then, [f"  in {self._run}/config.yaml; the same command gives {shown(today)} today"]
        return self._decided(parts, today) if is_open else (today, [])

    def _decided(self, parts: Sequence[str], today: Any) -> tuple[Any, list[str]]:
        """What the data, or what else a run asks before it begins, fill in."""
        from exp.check.plan import resolve  # which imports torch

        decided = resolve(self._config)
        value, _ = found_in(decided.plain, parts)
        if value is UNKNOWN or value is NOWHERE:
            faults = [f"  not known before this is mended: {fault}" for fault in decided.faults[:3]]
            return today, faults or ["  not known before the run"]
        if value == today:
            return value, [f"  not filled in: {fault}" for fault in decided.faults[:3]]
        is_of_data = parts[0] == "data" or today is UNKNOWN
        who = f"the data, {decided.plain['data']['_target_']}," if is_of_data else "the search for it before the run"
        return value, [f"  {who} filled in {shown(value)}"]

    def _row(self, one: Setting) -> tuple[str, str, str]:
        if one.effect == "sets":
            value = shown(one.value)
        elif one.effect == "covers":
            value = f"(gone: what holds it is {shown(one.value)})"
        else:
            value = "(the whole node anew)" if one.effect == "empties" else "(taken away)"
        if one.layer is None:
            return self._place(one), value, covered(one.text)
        reason = reason_of(self._config, one.layer)
        return one.place, value, "" if reason is None else f"{one.layer.config_path}, by {self._reason(reason)}"

    def _place(self, one: Setting) -> str:
        if one.layer is not None:
            return one.place
        if self._run is not None:
            return f"{self._run}/overrides.yaml"
        return one.place if one.text in self._typed else "from_run"

    def _reason(self, reason: str) -> str:
        if "=" not in reason:
            return reason
        return f"{covered(reason)} in {self._run}/overrides.yaml" if self._run else f"{covered(reason)}, command line"

    def _steps(self, key: str, written: str) -> Iterator[str]:
        for step in steps_of(self._raw, key, written):
            head = f"  {'  ' * step.depth}{step.text}"
            if step.key is None:
                yield f"{head}: {step.words}" if step.words else head
            elif step.value is NOWHERE:
                yield f"{head}: there is no {step.key}"
            else:
                yield f"{head}: {step.key} is {shown(step.value)}{self._last(step.key)}"

    def _last(self, key: str) -> str:
        settings = history_of(self._config, key)
        return f"  [{self._place(settings[-1])}]" if settings else ""

    # --- what is below a key ---

    def _choices(self, parts: Sequence[str]) -> Iterator[str]:
        """The options that were merged at a key, and who chose each."""
        if self._run is not None and not self._raw:
            return
        for layer in layers_of(self._config):
            reason = reason_of(self._config, layer)
            if split(layer.package) == tuple(parts) and reason is not None:
                yield f"  {layer.config_path}, by {self._reason(reason)}"

    def _rows_below(self, names: Sequence[str], node: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        for parts, written in _leaves(node):
            way = (*names, *parts)
            value, _ = found_in(self._values, way)
            text = shown(written if value is NOWHERE or value is UNKNOWN else value)
            settings = history_of(self._config, ".".join(way))
            place = self._place(settings[-1]) if settings else ""
            if is_interpolation(written) and value is not UNKNOWN:
                text = f"{shown(written)} = {text}"
            yield ".".join(way), text, place

    # --- no such key ---

    def _absent(self, key: str) -> Iterator[str]:
        parts = split(key)
        settings = history_of(self._config, key) if parts[:1] != ("hydra",) else []
        holder, _ = found_in(self._values, parts[:-1])
        if settings:
            yield f"{key}: not there any more"
            yield from _table([self._row(one) for one in settings])
        elif parts and parts[0] in REPLACED and has_module(self._raw):
            yield f"{key}: left out, for {self._raw['module']['_target_']} brings its own: {REPLACED[parts[0]][1]}"
        elif cure_of_key(key, "") is None and (default := self._default(holder, parts)) is not None:
            yield f"{key} = {default}"
            yield f"  nobody set it: it is the default of {holder['_target_']}"
        else:
            raise ConfigError([self._unknown(key, parts)])

    def _default(self, holder: Any, parts: Sequence[str]) -> str | None:
        return _default_of(holder["_target_"], parts[-1], self._today) if is_node(holder) else None

    def _unknown(self, key: str, parts: Sequence[str]) -> Fault:
        if parts[:1] == ("hydra",):
            return _fault("of Hydra's own", "a key of the run", "See python -m exp.train --cfg hydra", key=key)
        known = [".".join(way) for way in _ways(self._values)]
        last = parts[-1] if parts else ""
        held, _ = found_in(self._values, parts[:-1])
        siblings = list(map(str, held)) if isinstance(held, Mapping) else []
        habit = cure_of_key(key, "VALUE")
        parent = "".join(f"{part}." for part in parts[:-1])
        elsewhere = [one for one in known if one.rpartition(".")[2] == last]
        near = [f"{parent}{name}" for name in nearest(last, siblings)]
        near = nearest(key, elsewhere, likeness=0.0) or near or nearest(key, known)
        cure = habit if habit else f"Did you mean {near[0]}?" if near else None
        return _fault("there is no such key", f"one of {among(siblings or self._values, word=last)}", cure, key=key)


def _default_of(target: str, name: str, plain: Mapping[str, Any]) -> str | None:
    """The default of a parameter of a target, as YAML has it; None where it takes none of that name."""
    from exp.check.signature import signature_of  # whatever it names is imported
    from exp.check.stages import allowed
    from exp.config.targets import resolve

    try:
        found = resolve(target, returns=("builtins.object",), allow=allowed(dict(plain)))
    except ExpError:
        return None  # what is wrong with the target is the check's to say
    parameter = signature_of(found).parameters.get(name)
    if parameter is None:
        return None
    return "(must be given)" if parameter.default is inspect.Parameter.empty else shown(parameter.default)


def _leaves(node: Mapping[str, Any], names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in node.items():
        way = (*names, str(name))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, way)
        else:
            yield way, value


def _ways(node: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The way to every node and value of mappings."""
    for name, value in node.items() if isinstance(node, Mapping) else ():
        yield (*names, str(name))
        yield from _ways(value, (*names, str(name)))


def _table(rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """The rows in columns."""
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    for first, second, third in rows:
        yield f"  {first:<{widths[0]}}  {second:<{widths[1]}}  {third}".rstrip()


def shown(value: Any) -> str:
    """A value in one line, as YAML has it."""
    if isinstance(value, str):
        text = value if value and "\n" not in value and value == value.strip() else repr(value)
    elif isinstance(value, Mapping):
        text = f"{{{', '.join(f'{name}: {shown(inner)}' for name, inner in value.items())}}}"
    elif isinstance(value, list | tuple):
        text = f"[{', '.join(map(shown, value))}]"
    else:
        text = "(not known yet)" if value is UNKNOWN else show(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."
