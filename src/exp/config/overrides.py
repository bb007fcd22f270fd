"""Parse the overrides of a command line, and report the errors of all overrides before Hydra composes the config.

The errors are collected before the composition, because Hydra would report only the first error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, Sweep
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from exp.config.grammar import Numbers, parse_override
from exp.config.groups import USED_GROUPS, Vocabulary, dotted_keys
from exp.config.hydra_node import hydra_key_error
from exp.config.plain_tree import leaves
from exp.config.slots import AXIS, MANY, OF_CLASSES
from exp.config.values import adds_keys, deepest, set_value, takes_new_key
from exp.errors import COMMAND_LINE, ConfigError, ErrorDetails, command_line_error, unknown_word
from exp.redaction import find_exposed, mask_secrets
from exp.spelling import (
    among,
    call_forms,
    did_you_mean,
    find_nearest,
    fix_of_key,
    fix_of_option,
    fix_of_subcommand,
    is_typo,
)

MAX_CHARACTERS = 20_000
# Nodes of train.yaml that users may mistake for config groups.
NODES_OF_KEYS = ("trainer", "launch")
CALLS: dict[type, str] = {
    IntervalSweep: "an interval",
    Numbers: "a range",
    Glob: "a glob",
    ChoiceSweep: "a choice",
}
# A key in Hydra's grammar (1.3.8). The text after an @ is the key at which an option is merged.
KEY = re.compile(r"[A-Za-z_$][\w$-]*([./][\w$-]+)*(@[\w.$:-]*)?", re.ASCII)
SIGNS = {1: "", 2: "+", 3: "++", 4: "~"}
# Keys that an override may add without a +. `model.container` does not exist if the model itself is a container.
# `sweep.when` accepts keys of any name.
ADDING = ("model.container", "sweep.when")
NO_SUCH_KEY, IS_THERE = "there is no such key", "+ on an existing key"
TOO_DEEP = ("nested too deeply", "a value with fewer nested levels")


@dataclass(frozen=True, kw_only=True)
class Line:
    """An override of the command line.

    Args:
        text: Override as typed, such as `+hooks=memory`.
        parsed: Override as parsed by Hydra.
        sign: "", "+", "++" or "~".
        key: Key or config group, without the sign.
        group: Config group if the override chooses an option. "": the override sets a value.
    """

    text: str
    parsed: Override
    sign: str
    key: str
    group: str

    @property
    def value(self) -> Any:
        return self.parsed.value()

    @property
    def is_sweep(self) -> bool:
        return self.parsed.is_sweep_override()

    @property
    def value_text(self) -> str:
        return self.text.partition("=")[2]


def checked_lines(
    overrides: Sequence[str], vocabulary: Vocabulary, *, multirun: bool
) -> tuple[list[Line], list[ErrorDetails]]:
    """Parse overrides, and check them before the config is composed.

    Args:
        overrides: Overrides as typed.
        vocabulary: Groups, options and top-level keys that the command line may use.
        multirun: The command is a sweep (-m).

    Returns:
        Overrides without an error.
        Errors of the other overrides.
    """
    found = [_read(text, vocabulary) for text in overrides]
    errors = [one for one in found if isinstance(one, ErrorDetails)]
    lines = [one for one in found if isinstance(one, Line)]
    right = []
    for line in lines:
        others = [other for other in lines if line.group and other.group == line.group and other is not line]
        error = _line_error(line, vocabulary, multirun=multirun) or _pair_error(line, others, vocabulary)
        if error is None:
            right.append(line)
        else:
            errors.append(error)
    return right, errors


def _read(text: str, vocabulary: Vocabulary) -> Line | ErrorDetails:
    secret = find_exposed(text)
    if secret is not None:
        safe = mask_secrets(text)
        fix = f"Use single quotes, so that the shell does not insert the value: '{safe}'"
        expected = "the name of the environment variable, because exp records commands"
        return _error(safe.lstrip("+~").partition("=")[0], f"the value of {secret}", expected, fix)
    try:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"{len(text)} characters")
        parsed = parse_override(text)
    except (HydraException, RecursionError, ValueError) as error:
        return _syntax_error(text, error)
    if not parsed.key_or_group:
        return _syntax_error(text, ValueError())
    key = parsed.key_or_group
    # Hydra treats a mapping as values of the node, even if the key is a group.
    chooses = vocabulary.group_exists(key) and not isinstance(parsed.value(), dict)
    return Line(text=text, parsed=parsed, sign=SIGNS[parsed.type.value], key=key, group=key if chooses else "")


def as_override(text: str, fix: str | None, vocabulary: Vocabulary) -> str | None:
    """Convert a fix such as `Did you mean adam?` to a whole override, such as `Write optimizer=adam`.

    Args:
        text: Override as typed.
        fix: Fix of the override's error. Other fixes and None are returned unchanged.
        vocabulary: Groups, options and top-level keys that the command line may use.
    """
    found = re.fullmatch(r"Did you mean (\S+)\?", fix or "")
    if found is None:
        return fix
    key, _, value = text.partition("=")
    is_key = found[1].partition(".")[0] in vocabulary.words()
    return f"Write {found[1]}={value}" if is_key else f"Write {key}={found[1]}"


def for_hydra(lines: Sequence[Line], vocabulary: Vocabulary) -> list[str]:
    """Return the overrides that choose options, in the syntax that Hydra requires.

    For a group of the kind "axis", `+` becomes `=`, because the defaults list of train.yaml contains the group.

    For a group of the kind "many", all overrides become one override: `hooks=a +hooks=b` becomes `hooks=[a,b]`. Hydra
    accepts only one `+` per group, and ignores a `+` if the group also has an `=`.

    Args:
        lines: Overrides of the command.
        vocabulary: Groups, options and top-level keys that the command line may use.
    """
    choices = [line for line in lines if line.group and not line.is_sweep]
    replaced = {line.group: line.value for line in choices if line.sign == "" and line.parsed.package is None}
    added: dict[str, list[str]] = {}
    result = []
    for line in choices:
        is_placed = line.parsed.package is not None or vocabulary.kind(line.group) == "own"
        if line.sign != "+" or is_placed:
            result.append(line.text)
        elif vocabulary.kind(line.group) == "axis":
            result.append(line.text.removeprefix("+"))
        else:
            added.setdefault(line.group, []).extend(_options(line.value))
    for group, options in added.items():
        if group in replaced:
            options = [*_options(replaced[group]), *options]
        sign = "" if group in replaced else "+"
        result.append(f"{sign}{group}=[{','.join(dict.fromkeys(options))}]")
    return result


def _options(value: object) -> list[str]:
    return value if isinstance(value, list) else [str(value)]


def ignored_choices(lines: Sequence[Line], loaded: Iterable[str]) -> list[ErrorDetails]:
    """Return an error for each chosen option that Hydra did not merge, because a defaults list overrides the choice.

    Args:
        lines: Overrides of the command.
        loaded: Config paths of the merged files, such as "model/mlp".
    """
    choices = [line for line in lines if line.group and not line.is_sweep and line.parsed.package is None]
    last = {line.group: line for line in choices if line.sign == ""}
    counted = [*last.values(), *(line for line in choices if line.sign == "+")]
    ignored = [
        (line.group, option)
        for line in counted
        for option in _options(line.value)
        if f"{line.group}/{option}" not in loaded
    ]
    return [
        _error(
            group, f"the defaults lists of the files ignore {group}={option}", "an option that takes effect",
            f"Remove `override {group}` from the files",
        )
        for group, option in ignored
    ]  # fmt: skip


def sweep_error(parsed: Override) -> ErrorDetails | None:
    """Return an error if a call such as `interval(0,1)` is within a list or one of several swept values; else None."""
    value, key, text = parsed.value(), parsed.key_or_group, _shorten((parsed.input_line or "").partition("=")[2])
    inner = next(_calls_in(value), None)
    if inner is None:
        return None
    kind = CALLS[type(inner)]
    if isinstance(value, ChoiceSweep):
        return _error(key, f"{kind} among other values, {text}", f"{kind} alone, or single values")
    fix = f"To sweep over lists, separate whole lists by commas: {key}=[A,B],[C,D]"
    return _error(key, f"{kind} inside a list or a mapping, {text}", f"plain values there, or {kind} alone", fix)


def _calls_in(value: object) -> Iterator[Sweep | Glob]:
    """Yield the calls in Hydra's grammar, such as `interval(0,1)`, within a list, a mapping or several swept values."""
    inner = value.list if isinstance(value, ChoiceSweep) else value
    for one in inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ():
        if isinstance(one, Sweep | Glob):
            yield one
        else:
            yield from _calls_in(one)


def read_swept(text: str) -> Override:
    """Parse an override of a sweep, from the command line or from `hydra.sweeper.params` in a file.

    Raises:
        ConfigError: The override cannot be parsed, or contains a call such as `interval(0,1)` within a list.
    """
    try:
        parsed = parse_override(text)
        detail = sweep_error(parsed)
    except (HydraException, RecursionError) as error:
        detail = _syntax_error(text, error)
    if detail is not None:
        raise ConfigError([detail])
    return parsed


def _line_error(line: Line, vocabulary: Vocabulary, *, multirun: bool) -> ErrorDetails | None:
    if (wrong := sweep_error(line.parsed)) is not None:
        return wrong
    top = line.key.replace("/", ".").partition(".")[0]
    is_decided_later = top in vocabulary.own or (top in OF_CLASSES and "." in line.key)
    fix = None if is_decided_later else fix_of_key(line.key, line.value_text)
    if top == "hydra":
        if line.is_sweep:
            word = line.key.removeprefix("hydra.sweeper.params.")
            fix = None if word == line.key else f"Write {word}={line.value_text}, which is swept by -m"
            return _error(line.key, "several values", "one value, because Hydra's own settings cannot be swept", fix)
        error = hydra_key_error(line.key, line.value)
        if error is not None or line.group not in USED_GROUPS:
            return error
    elif fix is not None and line.group == "":
        return _habit_error(line, fix)
    elif top not in vocabulary.words():
        return _unknown_top(line, top, vocabulary)
    if line.is_sweep and not multirun:
        holds_list = isinstance(dict(leaves(vocabulary.declared)).get(line.key), list)
        takes_list = vocabulary.kind(line.group) == "many" if line.group else holds_list
        several = f". For all values in one run, write {line.sign}{line.key}=[{line.value_text}]" if takes_list else ""
        got, fix = f"several values, {line.value_text}", f"Put -m in front to run a job with each value{several}"
        return _error(line.key, got, "one value without -m", fix)
    return _choice_error(line, vocabulary) if line.group else _value_error(line, vocabulary)


def _pair_error(line: Line, others: Sequence[Line], vocabulary: Vocabulary) -> ErrorDetails | None:
    """Return the error of an override that conflicts with other overrides of the same group; None without a conflict.

    Args:
        line: Override to check.
        others: Other overrides that choose options of the same group.
        vocabulary: Groups, options and top-level keys that the command line may use.
    """
    added = [other for other in others if other.sign == "+" and other.parsed.package == line.parsed.package]
    if line.sign == "+" and (others if line.group in AXIS else vocabulary.kind(line.group) == "own" and added):
        return _error(line.group, f"two choices of an option, {line.text} and {others[0].text}", "one choice")
    if line.sign == "+" and others and line.is_sweep and vocabulary.kind(line.group) == "many":
        return _error(line.group, f"swept by {line.text} next to {others[0].text}", "one of the two")
    return None


def _choice_error(line: Line, vocabulary: Vocabulary) -> ErrorDetails | None:
    group, kind = line.group, vocabulary.kind(line.group)
    example = vocabulary.example(group)
    if not vocabulary.in_use(group) and line.parsed.package is None:
        expected = f"one of {among(vocabulary.groups, word=group)}"
        return _error(group, "not a config group of train.yaml", expected, fix_of_option(line.key, line.value))
    if line.sign == "++":
        return _error(group, f"++ on a group, {line.text}", "= to replace or + to add", f"Write {line.text[2:]}")
    if line.sign == "~" and kind != "own":
        fix = f"Write {group}=[] for no entry, or ~{group}.NAME to remove one" if kind != "one" else f"Write {example}"
        return _error(group, "~ on a group", "an option, because a group cannot be removed", fix)
    if line.sign == "+" and kind == "one" and line.parsed.package is None:
        return _error(group, f"+ on {group}, which takes one option", "= to replace it", f"Write {line.text[1:]}")
    errors = (_option_error(line, value, vocabulary) for value in _elements(line))
    return next(filter(None, errors), None)


def _option_error(line: Line, value: object, vocabulary: Vocabulary) -> ErrorDetails | None:
    group, kind = line.group, vocabulary.kind(line.group)
    example = vocabulary.example(group)
    options = vocabulary.options(group)
    if value is None:
        fix = f"Write {group}=[] for no option" if kind != "one" else f"Write {example}"
        return _error(group, "null", f"one of {among(options)}", fix)
    if isinstance(value, list) and (kind == "one" or (kind == "axis" and value)):
        known = [str(one) for one in value if vocabulary.has_option(group, str(one))]
        several = f", or -m {group}={','.join(known)} for a run with each" if len(known) > 1 else ""
        fix = f"Write {group}={known[0]}{several}" if known else f"Write {example}"
        return _error(group, f"a list, {line.value_text}", "one option", fix)
    for option in value if isinstance(value, list) else [value]:
        if not (isinstance(option, str) and vocabulary.has_option(group, option)):
            return _unknown_option(group, option, options)
    return None


def _unknown_option(group: str, option: object, options: Sequence[str]) -> ErrorDetails:
    got, fix = f"there is no option {option!r}", fix_of_option(group, option)
    return unknown_word(group, str(option), options, got=got, fix=fix, source=COMMAND_LINE)


def _elements(line: Line) -> list[object]:
    """Return the value of an override that chooses options. If the override is swept, return the value in each job.

    For a glob, the list is empty, because the values are unknown before the sweep.
    """
    if not line.is_sweep:
        return [line.value]
    if not line.parsed.is_choice_sweep() or not hasattr(line.value, "list"):
        return []
    return [parse_override(f"{line.group}={text}").value() for text in line.parsed.sweep_string_iterator()]


def _value_error(line: Line, vocabulary: Vocabulary) -> ErrorDetails | None:
    if "/" in line.key:
        group = line.key.rpartition("/")[0]
        return _error(line.key, "no such group", f"one of {among(vocabulary.groups, word=group)}")
    if line.key in NODES_OF_KEYS and line.key not in vocabulary.groups and isinstance(line.value, str):
        keys = f"Leave {line.text} out, and set single keys. --cfg job --package {line.key} lists the keys"
        fix = fix_of_option(line.key, line.value) or keys
        return _error(line.key, f"{line.text}, but {line.key} is not a group", f"a key below {line.key}", fix)
    if line.key in vocabulary.groups and line.key not in vocabulary.keys:
        return _unknown_option(line.key, line.value, vocabulary.options(line.key))
    if line.sign == "~" and "." not in line.key:
        fix = "Leave the override out to use the value of train.yaml"
        return _error(line.key, "~ for a top-level key, which cannot be removed", "a value", fix)
    return None


def _unknown_top(line: Line, top: str, vocabulary: Vocabulary) -> ErrorDetails:
    """Return the error of an override with an unknown first name in its key: neither a top-level key nor a group.

    Args:
        line: Override.
        top: First name of the override's key.
        vocabulary: Groups, options and top-level keys that the command line may use.
    """
    got = "no such group or key" if "." not in line.key else f"there is no top-level key {top}"
    # Nested keys are searched only if no group or top-level key is similar, because the search must compose a config.
    is_near = is_typo(top, vocabulary.words())
    elsewhere = [] if is_near else [key for key in vocabulary.keys_below if key.rpartition(".")[2] == line.key]
    fix = f"Did you mean {elsewhere[0]}?" if elsewhere else did_you_mean(top, vocabulary.words())
    if fix is None or (line.sign in ("+", "++") and not is_near and not elsewhere):
        fix = f"To add a value of your own, write +vars.{line.key.replace('/', '.')}={line.value_text}"
        if "." not in line.key and isinstance(line.value, str):
            fix = f"Write conf/{line.key}/{line.value}.yaml for a group of your own. {fix}"
    return _error(line.key, got, f"one of {among(vocabulary.words(), word=top)}", fix)


def apply_values(config: DictConfig, lines: Sequence[Line], vocabulary: Vocabulary) -> list[tuple[Line, ErrorDetails]]:
    """Apply the overrides of values to the config that Hydra composed from the chosen options.

    Swept values are not applied here, because each job applies and checks its own value. If the options of a group are
    swept, errors are not reported. A key that does not exist in this config may exist in the config of a job.

    Args:
        config: Composed config, which is changed in place.
        lines: Overrides of the command.
        vocabulary: Groups, options and top-level keys that the command line may use.

    Returns:
        Pairs of an override that cannot be applied, and its error.
    """
    is_open = any(line.group and line.is_sweep for line in lines)
    # Keys that a swept override adds, as in `+precision.keep.a=fp32,fp64`. Only the configs of the jobs have these
    # keys.
    added = set()
    found: list[tuple[Line, ErrorDetails]] = []
    for line in lines:
        # A key with a slash is a group of Hydra that exp ignores. At this point, its value has no effect.
        if line.group or "/" in line.key:
            continue
        detail = None if line.key in added else _unfit_error(line, config, vocabulary)
        if line.is_sweep and line.sign.startswith("+"):
            added.add(line.key)
        try:
            if detail is None and not line.is_sweep:
                set_value(config, line.parsed, declared=vocabulary.declared)
        except RecursionError:
            detail = _error(line.key, *TOO_DEEP)
        except OmegaConfBaseException as error:
            got = f"{_shorten(line.text)}: {str(error).splitlines()[0]}"
            detail = _error(line.key, got, "a value that the key accepts")
        if detail is not None and not is_open:
            found.append((line, detail))
    return found


def _unfit_error(line: Line, config: DictConfig, vocabulary: Vocabulary) -> ErrorDetails | None:
    """Return the error of an override that cannot be applied to the composed config; None if it can be applied.

    For example, the key of the override does not exist.
    """
    there, node = deepest(config, line.key)
    holder, _, last = line.key.rpartition(".")
    if line.key in ADDING and line.sign == "":
        return None
    if there != line.key:
        is_new = line.sign == "" and there == holder and takes_new_key(holder, node, last)
        if line.sign in ("+", "++") or is_new:
            return None
        return _missing_key_error(line, config, vocabulary, parent=there, node=node)
    is_plain = line.is_sweep or not isinstance(line.value, dict | list)
    if line.sign == "+" and node is not None and is_plain:
        if isinstance(node, DictConfig) and node:
            keys = [str(key) for key in node]
            adds = f"The keys are {among(keys)}: write {line.key}.{keys[0]}={line.value_text}"
            return _error(line.key, f"{_shorten(line.text)}, one value for a mapping", f"a key below {line.key}", adds)
        return _error(line.key, IS_THERE, "= to change the value", f"Write {line.text[1:]}")
    is_merged = line.sign == "" and not line.is_sweep and isinstance(line.value, dict) and isinstance(node, DictConfig)
    if is_merged and not ("_target_" in line.value and "_target_" in node) and adds_keys(node, line.value):
        fix = f"Write '+{line.text}', which adds to the mapping"
        return _error(line.key, f"{_shorten(line.text)}, with keys that do not exist", "existing keys", fix)
    return None


def _habit_error(line: Line, fix: str) -> ErrorDetails:
    """Return the error of an override with a key of another framework.

    Args:
        line: Override with the key.
        fix: Sentence with the equivalent override of exp, or the reason why exp has no equivalent.
    """
    got = "this key has another name in exp" if fix.startswith("Write") else "there is no such key in exp"
    return _error(line.key, got, "a key of exp", fix)


def _missing_key_error(
    line: Line, config: DictConfig, vocabulary: Vocabulary, *, parent: str, node: object
) -> ErrorDetails:
    """Return the error of an override with a key that the composed config does not have.

    Args:
        line: Override.
        config: Composed config.
        vocabulary: Groups, options and top-level keys that the command line may use.
        parent: Longest beginning of the key that exists in the config.
        node: Value of the config at `parent`.
    """
    last = line.key.rpartition(".")[2]
    word = line.key.removeprefix(f"{parent}.").partition(".")[0] if parent else line.key
    siblings = [str(key) for key in node if key != "hydra"] if isinstance(node, DictConfig) else []
    known = fix_of_key(line.key, line.value_text)
    if known is not None:
        return _habit_error(line, known)
    near = find_nearest(word, siblings)
    elsewhere = [key for key in dotted_keys(config) if key.rpartition(".")[2] == last]
    fix = None
    if parent in MANY and vocabulary.has_option(parent, word):
        fix = f"Write +{parent}={word} {line.key}={line.value_text}"
    elif isinstance(node, DictConfig) and not siblings and line.sign == "":
        # In a mapping with any names, such as precision.keep, new keys need a +.
        fix = f"To add the key, write +{line.text}"
    elif near or elsewhere:
        fix = f"Did you mean {f'{parent}.' if parent else ''}{near[0]}?" if near else f"Did you mean {elsewhere[0]}?"
    if isinstance(node, DictConfig) and "_target_" in siblings and line.sign == "":
        fix = f"{fix + ' ' if fix else ''}To pass {last} to {node['_target_']}, write +{line.text}"
    where = f"one of {among(siblings, word=word)}" if siblings else f"no key below {parent}"
    return _error(line.key, NO_SUCH_KEY, where, fix)


def _syntax_error(text: str, error: Exception) -> ErrorDetails:
    typed, sign, value = text.lstrip("+~").partition("=")
    key, short = _shorten(typed), _shorten(text)
    if isinstance(error, RecursionError):
        return _error(key, *TOO_DEEP)
    if not sign:
        pair = re.fullmatch(r"[+~]*([\w.]+):(.+)", text)
        fix = f"Write {pair[1]}={pair[2]}" if pair else "Flags begin with -, see --help"
        return _error(key, f"{short!r} has no =", "key=value", fix_of_subcommand(text) or fix)
    if not KEY.fullmatch(typed):
        near = ".".join(re.findall(r"[\w$-]+", typed, re.ASCII))
        fixed = f"Did you mean {_shorten(f'{near}={value}')}?" if KEY.fullmatch(near) else None
        return _error(key or "=", f"{short!r} does not begin with a key", "names joined by dots, or a group", fixed)
    message = str(error).split("\nSee ")[0].splitlines()
    problem = next((line for line in message if not line.startswith("Error parsing over")), type(error).__name__)
    got = f"{short!r} cannot be read: {re.sub(r'.* while evaluating .*?: ', '', problem)[:120]}"
    if called := re.match(r"(\w+)\(", value):
        word, forms = called[1], call_forms()
        if word in forms:
            return _error(key, got, forms[word])
        near_forms = ["tag"] if "log" in word.lower() else find_nearest(word, forms) or ["interval"]
        got = f"{short!r} cannot be read: there is no {word}(...)"
        return _error(key, got, f"one of {', '.join(forms)}", f"Write {forms[near_forms[0]]}")
    return _error(key, got, "key=value", f"Quote special characters for the shell and for Hydra: '{key}=\"...\"'")


def _error(key: str, got: str, expected: str, fix: str | None = None) -> ErrorDetails:
    return command_line_error(key.strip() or "overrides", got, expected, fix)


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
