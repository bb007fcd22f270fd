"""python -m exp.why KEY [overrides]: show the file, group, override or interpolation that set a key.

python -m exp.why optimizer.lr model=mlp optimizer=sgd        all files and overrides that set the key, the last wins
python -m exp.why hooks debug=overfit                         the values below a key, each with its source
python -m exp.why data.num_classes data=wine                  a value that the data determine
python -m exp.why seed from_run=outputs/train/2026-01-31/12-00-00  the command of an earlier run
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from omegaconf import DictConfig

from exp.check.stages import allowed_packages, compose
from exp.cli.command_line import answer_question, parse_arguments
from exp.config.frozen import COMPOSITION
from exp.config.plain_tree import is_node, leaves
from exp.config.reading import ENVIRONMENT, REFERENCE, UNKNOWN, raw_values, read
from exp.config.search_path import display_path
from exp.config.sources import REMOVED, Setting, above, history_of
from exp.config.yaml_files import position_of, split
from exp.errors import COMMAND_LINE, ConfigError, ExpError, config_error
from exp.output import command
from exp.redaction import mask_secrets, redact
from exp.spelling import among, find_nearest, fix_of_key, show

PROGRAM = "python -m exp.why"
# The largest number of characters of a value in the table.
MOST_CHARACTERS = 60
# Beginnings of keys whose values the config may leave open. The data or a search for a checkpoint determines such a
# value before the run starts.
DETERMINED = ("data.", "resume", "weights.from")
MOST_STEPS = 40
Row = tuple[str, str, str]


@command()
def main(argv: Sequence[str]) -> int:
    """Print the value of a key, and the files and overrides that set it. Nothing is trained or written.

    Returns:
        Exit status: 0, or 2 if the key does not exist or the command line has an error.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    arguments = parse_arguments(argv, program=PROGRAM)
    if answer_question(arguments):
        return 0
    key, overrides = _key(arguments.overrides)
    config = compose(overrides, config_dir=arguments.config_dir, config_name=arguments.config_name)
    question = Question(config, typed=overrides)
    for line in question.answer(key):
        print(redact(line))
    return 0


def _key(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the dotted key in the arguments of the command, and the overrides.

    Raises:
        ConfigError: The arguments contain no key, or several keys.
    """
    keys = [word for word in words if "=" not in word and not word.startswith("~")]
    if len(keys) != 1:
        got = f"{len(keys)} keys, {' and '.join(keys)}" if keys else f"{' '.join(words)}: only overrides"
        raise _error(got, "one dotted key, and overrides", f"{PROGRAM} optimizer.lr model=mlp")
    return ".".join(split(keys[0])), [word for word in words if word != keys[0]]


def _error(got: str, expected: str, fix: str | None = None, *, key: str = "KEY") -> ConfigError:
    return config_error(key, got=got, expected=expected, fix=fix, source=COMMAND_LINE)


class Question:
    """A config, and a method that explains the value of a key.

    Args:
        config: Composed config.
        typed: Overrides of the command.
    """

    def __init__(self, config: DictConfig, *, typed: Sequence[str]) -> None:
        self._config, self._typed = config, typed
        raw = raw_values(config)
        raw.pop(COMPOSITION, None)
        self._plain = {name: value for name, value in read(config)[0].items() if name in raw}
        self._raw, self._values = dict(leaves(raw)), dict(leaves(self._plain))

    def answer(self, key: str) -> Iterator[str]:
        """Yield the lines of the output for a key: its value, and the files and overrides that set it.

        Raises:
            ConfigError: The key does not exist.
        """
        settings = history_of(self._config, key)
        holder: object = self._values.get(key.rpartition(".")[0])
        if isinstance(self._raw.get(key), Mapping) and self._raw[key]:
            yield f"{key}:"
            yield from _table([self._summary(*one) for one in _values_below(self._raw, key)])
        elif key in self._raw:
            value, note = self._value(key)
            yield f"{key} = {show_value(value)}"
            yield from _table([self._row(one, key) for one in settings])
            yield from islice(self._references(key), MOST_STEPS)
            yield from [note] if note else ()
        elif settings and key.partition(".")[0] != "hydra":
            yield f"{key}: removed"
            yield from _table([self._row(one, key) for one in settings])
        elif is_node(holder) and fix_of_key(key, "") is None and (default := self._default(holder, key)) is not None:
            yield f"{key} = {default}"
            yield f"  not set: the default of {holder['_target_']}"
        else:
            raise self._unknown_error(key)

    def _value(self, key: str) -> tuple[object, str]:
        """Return the value of a key, and a note about the value.

        The note is empty if the config contains the value. Otherwise the note names the source of the value: the data,
        or a search before the run, as for `resume: auto`.
        """
        value = self._values.get(key, UNKNOWN)
        if value is not UNKNOWN and not (key.startswith(DETERMINED) and value in (None, "auto")):
            return value, ""
        from exp.check.resolution import resolve  # imports torch

        decided = resolve(self._config)
        found = dict(leaves(decided.plain)).get(key, UNKNOWN)
        if found in (UNKNOWN, value):
            return value, next((f"  unknown until this error is fixed: {error}" for error in decided.errors), "")
        is_of_data = key.startswith("data.") or value is UNKNOWN
        who = f"the data, {decided.settings.data['_target_']}," if is_of_data else "the search for it before the run"
        return found, f"  {who} filled in {show_value(found)}"

    def _row(self, one: Setting, key: str) -> Row:
        if one.value is REMOVED:
            value = "(removed)"
        elif one.key == key:
            value = show_value(one.value)
        else:
            value = "(the whole node)" if isinstance(one.value, Mapping) else f"({one.key} is {show_value(one.value)})"
        return self._place(one), value, mask_secrets(one.text) if one.layer is None else one.layer.config_path

    def _summary(self, key: str, written: object) -> Row:
        value = self._values.get(key, UNKNOWN)
        text = show_value(written if value is UNKNOWN else value)
        if isinstance(written, str) and "${" in written and value is not UNKNOWN:
            text = f"{show_value(written)} = {text}"
        return key, text, self._last_place(key)

    def _place(self, one: Setting) -> str:
        if one.file is not None:
            found = position_of(one.file, one.keys)
            return display_path(one.file) if found is None else f"{found.file}:{found.line}"
        return COMMAND_LINE if one.text in self._typed else "from_run"

    def _last_place(self, key: str) -> str:
        settings = history_of(self._config, key)
        return self._place(settings[-1]) if settings else ""

    def _references(self, key: str, trail: tuple[str, ...] = ()) -> Iterator[str]:
        """Yield a line for each reference in the value of a key.

        If the referenced value also contains references, indented lines for them follow.

        Args:
            key: Dotted key.
            trail: Keys that led to this key by references. To avoid an endless loop, references to these keys are not
                followed. Default: ().
        """
        text = self._raw.get(key)
        if not isinstance(text, str) or key in trail:
            return
        indent = "  " * (len(trail) + 1)
        for match in REFERENCE.finditer(text):
            there = _whole(match[1], key)
            place = self._last_place(there)
            found = f"{there} is {show_value(self._raw[there])}" if there in self._raw else f"there is no {there}"
            yield f"{indent}{match[0]}: {found}{f'  [{place}]' if place else ''}"
            yield from self._references(there, (*trail, key))
        for match in ENVIRONMENT.finditer(text):
            yield f"{indent}{match[0]}}}: {match[1]} is {'set' if match[1].strip() in os.environ else 'not set'}"

    def _default(self, holder: Mapping[str, Any], key: str) -> str | None:
        """Return the text of a parameter's default value in the signature of a node's target.

        Args:
            holder: Node with the `_target_`.
            key: Dotted key of the parameter in the node.

        Returns:
            The text. None if the target lacks the parameter.
        """
        from exp.check.signature import signature_of  # imports the target
        from exp.config.targets import resolve

        try:
            target = resolve(holder["_target_"], returns=("builtins.object",), allow=allowed_packages(self._plain))
        except ExpError:
            return None  # exp.check reports the error
        parameter = signature_of(target).parameters.get(key.rpartition(".")[2])
        if parameter is None:
            return None
        return "(must be given)" if parameter.default is inspect.Parameter.empty else show_value(parameter.default)

    def _unknown_error(self, key: str) -> ConfigError:
        if key.partition(".")[0] == "hydra":
            return _error("a key of Hydra", "a key of the run", "See python -m exp.train --cfg hydra", key=key)
        parent, _, name = key.rpartition(".")
        holder = self._values.get(parent)
        siblings = list(map(str, holder)) if isinstance(holder, Mapping) else []
        elsewhere = [one for one in self._values if one.rpartition(".")[2] == name]
        near = [f"{parent}.{one}" for one in find_nearest(name, siblings)]
        near = find_nearest(key, elsewhere, likeness=0.0) or near or find_nearest(key, list(self._values))
        fix = fix_of_key(key, "VALUE") or (f"Did you mean {near[0]}?" if near else None)
        known = siblings or [one for one in self._values if "." not in one]
        return _error("there is no such key", f"one of {among(known, word=name)}", fix, key=key)


def _values_below(tree: Mapping[str, object], key: str) -> Iterator[tuple[str, object]]:
    """Yield each dotted key below a key, and its value. A list is yielded as one value.

    Args:
        tree: Values of all nodes by dotted key.
        key: Dotted key of a node.
    """
    for one, value in tree.items():
        is_in_list = any(isinstance(tree[holder], list) for holder in above(one) if holder in tree)
        if one.startswith(f"{key}.") and not (isinstance(value, Mapping) and value) and not is_in_list:
            yield one, value


def _whole(reference: str, at: str) -> str:
    """Return the absolute dotted key of a reference. The reference may be relative, such as `.lr` or `..seed`.

    Args:
        reference: Reference without `${` and `}`.
        at: Key of the value that contains the reference.
    """
    name = reference.lstrip(".").strip()
    dots = len(reference) - len(reference.lstrip("."))
    return ".".join([*split(at)[:-dots], name]) if dots else name


def _table(rows: Sequence[Row]) -> Iterator[str]:
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    for first, second, third in rows:
        yield f"  {first:<{widths[0]}}  {second:<{widths[1]}}  {third}".rstrip()


def show_value(value: object) -> str:
    """Return a value as one line of YAML, shortened to MOST_CHARACTERS."""
    if isinstance(value, str):
        text = value if value and "\n" not in value and value == value.strip() else repr(value)
    elif isinstance(value, Mapping):
        text = f"{{{', '.join(f'{name}: {show_value(inner)}' for name, inner in value.items())}}}"
    elif isinstance(value, list | tuple):
        text = f"[{', '.join(map(show_value, value))}]"
    else:
        text = "(not known yet)" if value is UNKNOWN else show(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."
