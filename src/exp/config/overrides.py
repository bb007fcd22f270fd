"""The command line's overrides: read, handed to Hydra, and each that is wrong told on its own.

Most is said before anything is composed. Hydra stops at the first that it stumbles over; a person wants all.
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
from exp.config.groups import COMMAND_LINE, USED_GROUPS, Vocabulary, dotted_keys
from exp.config.habits import fix_of_key, fix_of_option
from exp.config.hydra_node import hydra_key_error, swept_error
from exp.config.plain_tree import leaves
from exp.config.slots import AXIS, MANY, OF_CLASSES
from exp.config.values import adds_keys, deepest, set_value, takes_new_key
from exp.errors import ConfigError, ErrorDetails
from exp.redaction import find_exposed, mask_secrets
from exp.spelling import among, did_you_mean, find_nearest, is_typo

MAX_CHARACTERS = 20_000
# Nodes of train.yaml that people take for groups.
NODES_OF_KEYS = ("trainer", "launch")
CALLS: dict[type, str] = {
    IntervalSweep: "an interval",
    Numbers: "a range",
    Glob: "a glob",
    ChoiceSweep: "a choice",
}
# What Hydra's grammar takes for one (1.3.8), with the place of a group behind an @.
KEY = re.compile(r"[A-Za-z_$][\w$-]*([./][\w$-]+)*(@[\w.$:-]*)?", re.ASCII)
# What a value may be a call of, and how it is written.
FORMS = {
    "interval": "interval(LOW,HIGH), with two numbers",
    "tag": "tag(log,interval(LOW,HIGH))",
    "range": "range(START,STOP) or range(START,STOP,STEP), with finite numbers and a STEP that is not 0",
    "int": "a whole number, or int(interval(LOW,HIGH)) with one inside",
    "float": "a number, or float(range(START,STOP))",
    "bool": "true or false",
    "str": "a text, or str(A,B)",
    "choice": "choice(A,B), with one value or more",
    "glob": "glob(PATTERN)",
    "shuffle": "shuffle(A,B) or shuffle(range(START,STOP))",
    "sort": "sort(A,B), with values that can be compared",
}
# LightningCLI's subcommands.
SUBCOMMANDS = {
    "fit": "Leave it out: exp.train trains",
    "train": "Leave it out: exp.train trains",
    "validate": "Write train=false test=false validate=true resume=auto",
    "test": "Write train=false resume=auto",
    "predict": "Write train=false test=false predict=true resume=auto",
}
SIGNS = {1: "", 2: "+", 3: "++", 4: "~"}
# A model need not name the container that its class is, and the conditions of a sweep are a mapping of any keys.
ADDING = ("model.container", "sweep.when")
NO_SUCH_KEY, IS_THERE = "there is no such key", "+ on a key that is there"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One override as typed, and what it says. key: without a sign; group: the group it chooses from, or "" """

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


def read_lines(overrides: Sequence[str], vocabulary: Vocabulary) -> tuple[list[Line], list[ErrorDetails]]:
    """The overrides that can be read, and an error for each that cannot."""
    lines, errors = [], []
    for text in overrides:
        secret = find_exposed(text)
        if secret is not None:
            errors.append(_exposed_error(text, secret))
            continue
        try:
            if len(text) > MAX_CHARACTERS:
                raise ValueError(f"{len(text)} characters")
            parsed = parse_override(text)
        except (HydraException, RecursionError, ValueError) as error:
            errors.append(_syntax_error(text, error))
            continue
        if not parsed.key_or_group:
            errors.append(_syntax_error(text, ValueError()))
            continue
        # Hydra takes a mapping given to a group for values of the node.
        chooses = vocabulary.group_exists(parsed.key_or_group) and not isinstance(parsed.value(), dict)
        lines.append(Line(
            text=text, parsed=parsed, sign=SIGNS[parsed.type.value], key=parsed.key_or_group,
            group=parsed.key_or_group if chooses else "",
        ))  # fmt: skip
    return lines, errors


def checked_lines(
    overrides: Sequence[str], vocabulary: Vocabulary, *, multirun: bool
) -> tuple[list[Line], list[ErrorDetails]]:
    """Return the overrides that may be right, and the errors of the others."""
    lines, errors = read_lines(overrides, vocabulary)
    right = []
    for line in lines:
        others = [other for other in lines if line.group and other.group == line.group and other is not line]
        error = _line_error(line, vocabulary, multirun=multirun) or _pair_error(line, others, vocabulary)
        right += [line] if error is None else []
        errors += [] if error is None else [error]
    return right, errors


def mended(text: str, fix: str | None, vocabulary: Vocabulary) -> str | None:
    """A fix that proposes a spelling as the whole override: `Write optimizer=adam` for `Did you mean adam?`."""
    found = re.fullmatch(r"Did you mean (\S+)\?", fix or "")
    if found is None:
        return fix
    key, _, value = text.partition("=")
    is_key = found[1].partition(".")[0] in vocabulary.words()
    return f"Write {found[1]}={value}" if is_key else f"Write {key}={found[1]}"


def for_hydra(lines: Sequence[Line], vocabulary: Vocabulary) -> list[str]:
    """Return the choices of groups for Hydra, so that `+` means one thing whatever else is on the command line.

    An axis is always written `=`, at its place of the defaults list. The `+` of a many-group are joined with each
    other and with its `=`, because Hydra takes one `+` per group and ignores it next to an `=`.
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


def _options(value: Any) -> list[str]:
    return value if isinstance(value, list) else [str(value)]


def ignored_choices(lines: Sequence[Line], loaded: Iterable[str]) -> list[ErrorDetails]:
    """Return an error for each choice that the composition did not follow. loaded: the config paths of the files."""
    choices = [line for line in lines if line.group and not line.is_sweep and line.parsed.package is None]
    last = {line.group: line for line in choices if line.sign == ""}
    counted = [*last.values(), *(line for line in choices if line.sign == "+")]
    chosen = [(line.group, option) for line in counted for option in _options(line.value)]
    expected = "a choice that takes effect"
    return [
        _error(
            group, f"{group}={option} was ignored by the defaults list", expected, f"Look for `override {group}` in it"
        )
        for group, option in chosen
        if f"{group}/{option}" not in loaded
    ]


def sweep_error(parsed: Override) -> ErrorDetails | None:
    """Return the error of an override whose values no sweep can name: calls in lists, and among other values."""
    value, key, text = parsed.value(), parsed.key_or_group, _short((parsed.input_line or "").partition("=")[2])
    inner = next(_calls_in(value), None)
    if inner is None:
        return None
    kind = CALLS[type(inner)]
    if isinstance(value, ChoiceSweep):
        return _error(key, f"{kind} among other values, {text}", f"{kind} alone, or single values")
    fix = f"Name whole lists: {key}=[A,B],[C,D]"
    return _error(key, f"{kind} inside a list or a mapping, {text}", f"plain values there, or {kind} alone", fix)


def _calls_in(value: Any) -> Iterator[Sweep | Glob]:
    """The calls of a sweep inside a list, a mapping or the values of another one."""
    inner = value.list if isinstance(value, ChoiceSweep) else value
    for one in inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ():
        if isinstance(one, Sweep | Glob):
            yield one
        else:
            yield from _calls_in(one)


def read_swept(text: str) -> Override:
    """An override of a sweeper, which a file may have said.

    Raises: ConfigError where it cannot be read, or no sweep can say its values.
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
            return swept_error(line.key, line.value_text)
        error = hydra_key_error(line.key, line.value)
        if error is not None or line.group not in USED_GROUPS:
            return error
    elif fix is not None and line.group == "":
        return _habit_error(line, fix)
    elif top not in vocabulary.words():
        return _unknown_word(line, top, vocabulary)
    if line.parsed.package is not None and (error := _place_error(line, vocabulary)) is not None:
        return error
    if line.is_sweep and not multirun:
        holds_list = isinstance(dict(leaves(vocabulary.declared)).get(line.key), list)
        takes_list = vocabulary.kind(line.group) == "many" if line.group else holds_list
        several = f", write {line.sign}{line.key}=[{line.value_text}] for all of them at once" if takes_list else ""
        got, fix = f"several values, {line.value_text}", f"Put -m in front for one job each{several}"
        return _error(line.key, got, "one value without -m", fix)
    return _choice_error(line, vocabulary) if line.group else _value_error(line, vocabulary)


def _place_error(line: Line, vocabulary: Vocabulary) -> ErrorDetails | None:
    """What is wrong with the place of a group, `model@vars.teacher`: its own is meant without @, others are added."""
    place, value = str(line.parsed.package), line.value_text
    key = f"{line.key}@{place}"
    if place == line.key.replace("/", "."):
        return _error(key, "the place that the group has anyway", "a group alone", f"Write {line.key}={value}")
    if place.partition(".")[0] not in vocabulary.keys:
        fix = f"Write +{line.key}@vars.{place}={value}, and ${{vars.{place}}} where it is to be used"
        return _error(key, "a place outside the known keys", "a place below one of them", fix)
    if line.sign == "":
        fix = f"Write +{line.key}@{place}={value}"
        return _error(key, "= on a place of which nothing was chosen", "+ to add", fix)
    return None


def _pair_error(line: Line, others: Sequence[Line], vocabulary: Vocabulary) -> ErrorDetails | None:
    """Return the error of a `+` that the other choices of its group exclude."""
    beside = [other for other in others if other.sign == "+" and other.parsed.package == line.parsed.package]
    if line.sign == "+" and (others if line.group in AXIS else vocabulary.kind(line.group) == "own" and beside):
        return _error(line.group, f"chosen twice, {line.text} and {others[0].text}", "one choice")
    if line.sign == "+" and others and line.is_sweep and vocabulary.kind(line.group) == "many":
        return _error(line.group, f"swept by {line.text} next to {others[0].text}", "one of the two")
    return None


def _choice_error(line: Line, vocabulary: Vocabulary) -> ErrorDetails | None:
    group, kind = line.group, vocabulary.kind(line.group)
    example = vocabulary.example(group)
    if not vocabulary.in_use(group) and line.parsed.package is None:
        expected = f"one of {among(vocabulary.groups, word=group)}"
        return _error(group, "no group of train.yaml", expected, fix_of_option(line.key, line.value))
    if line.sign == "++":
        return _error(group, f"++ on a group, {line.text}", "= to replace or + to add", f"Write {line.text[2:]}")
    if line.sign == "~" and kind != "own":
        fix = f"Write {group}=[] for none, ~{group}.NAME for one less" if kind != "one" else f"Write {example}"
        return _error(group, "~ on a group", "a choice: a group cannot be removed", fix)
    if line.sign == "+" and kind == "one" and line.parsed.package is None:
        return _error(group, f"+ on {group}, of which there is one", "= to replace it", f"Write {line.text[1:]}")
    values = _elements(line)
    if values is None:
        return None
    for value in values:
        error = _chosen_value_error(line, value, vocabulary, example)
        if error is not None:
            return error
    return None


def _chosen_value_error(line: Line, value: Any, vocabulary: Vocabulary, example: str) -> ErrorDetails | None:
    group, kind = line.group, vocabulary.kind(line.group)
    if value is None:
        fix = f"Write {group}=[] for none" if kind != "one" else f"Write {example}"
        return _error(group, "null", f"one of {among(vocabulary.options(group))}", fix)
    if isinstance(value, list):
        if kind == "one" or (kind == "axis" and value):
            wanted = "one option" if kind == "one" else "one option, for it tunes the whole config"
            known = [str(one) for one in value if vocabulary.has_option(group, str(one))]
            several = f", or -m {group}={','.join(known)} for a run with each" if len(known) > 1 else ""
            fix = f"Write {group}={known[0]}{several}" if known else f"Write {example}"
            return _error(group, f"a list, {line.value_text}", wanted, fix)
        options = value
    else:
        options = [value]
    return next((error for option in options if (error := _option_error(group, option, vocabulary))), None)


def _option_error(group: str, option: object, vocabulary: Vocabulary) -> ErrorDetails | None:
    """What is wrong with one option of a group, or None."""
    if isinstance(option, str) and vocabulary.has_option(group, option):
        return None
    options = vocabulary.options(group)
    expected = f"one of {among(options, word=str(option))}" if options else "an option, of which it has none"
    fix = fix_of_option(group, option) or did_you_mean(str(option), options)
    return _error(group, f"there is no option {option!r}", expected, fix)


def _elements(line: Line) -> list[Any] | None:
    """The single values of a choice, the swept ones one by one; None where only a sweeper can list them."""
    if not line.is_sweep:
        return [line.value]
    if not line.parsed.is_choice_sweep() or not hasattr(line.value, "list"):
        return None
    return [parse_override(f"{line.group}={text}").value() for text in line.parsed.sweep_string_iterator()]


def _value_error(line: Line, vocabulary: Vocabulary) -> ErrorDetails | None:
    if "/" in line.key:
        group = line.key.rpartition("/")[0]
        return _error(line.key, "no such group", f"one of {among(vocabulary.groups, word=group)}")
    if line.key in NODES_OF_KEYS and line.key not in vocabulary.groups and isinstance(line.value, str):
        keys = f"Leave it out: its keys are set one by one, see --cfg job --package {line.key}"
        fix = fix_of_option(line.key, line.value) or keys
        return _error(line.key, f"no group, but a node of train.yaml: {line.text}", "a key of it", fix)
    if line.key in vocabulary.groups and line.key not in vocabulary.keys:
        return _option_error(line.key, line.value, vocabulary)
    if line.sign == "~" and "." not in line.key:
        return _error(line.key, "~ on a key at the top", "a value", "Leave it out: it stays as train.yaml has it")
    return None


def _unknown_word(line: Line, top: str, vocabulary: Vocabulary) -> ErrorDetails:
    what = "no such group or key" if "." not in line.key else f"there is no {top} at the top"
    # The keys below the top have to be composed, which a slip of one letter need not wait for.
    is_near = is_typo(top, vocabulary.words())
    elsewhere = [] if is_near else [key for key in vocabulary.keys_below if key.rpartition(".")[2] == line.key]
    fix = f"Did you mean {elsewhere[0]}?" if elsewhere else did_you_mean(top, vocabulary.words())
    if fix is None or (line.sign in ("+", "++") and not is_near and not elsewhere):
        fix = f"A value of your own is +vars.{line.key.replace('/', '.')}={line.value_text}"
        if "." not in line.key and isinstance(line.value, str):
            fix = f"Write conf/{line.key}/{line.value}.yaml for a group of your own. {fix}"
    return _error(line.key, what, f"one of {among(vocabulary.words(), word=top)}", fix)


def apply_values(config: DictConfig, lines: Sequence[Line], vocabulary: Vocabulary) -> list[tuple[Line, ErrorDetails]]:
    """Apply the overrides of values one by one to what the choices of groups compose to.

    The key of a swept value is looked at, and its value is left to the jobs. If options of a group are swept, they may
    have the keys: then a value that does not fit is left to the jobs, too.

    Returns:
        The overrides that do not fit, each with its error.
    """
    is_open = any(line.group and line.is_sweep for line in lines)
    # Keys that the jobs of a sweep have: `+precision.keep.a=fp32,fp64 precision.keep.a=fp64`.
    added = set()
    found: list[tuple[Line, ErrorDetails]] = []
    for line in lines:
        # Hydra's own groups that exp does not use have passed the check with the value that exp has anyway.
        if line.group or "/" in line.key:
            continue
        detail = None if line.key in added else _unfit_error(line, config, vocabulary)
        if line.is_sweep and line.sign.startswith("+"):
            added.add(line.key)
        try:
            if detail is None and not line.is_sweep:
                set_value(config, line.parsed, declared=vocabulary.declared)
        except RecursionError:
            detail = _error(line.key, "nested too deeply", "a value of a few levels")
        except OmegaConfBaseException as error:
            got = f"{_short(line.text)}: {str(error).splitlines()[0]}"
            detail = _error(line.key, got, "a value that fits")
        if detail is not None and not is_open:
            found.append((line, detail))
    return found


def _unfit_error(line: Line, config: DictConfig, vocabulary: Vocabulary) -> ErrorDetails | None:
    """Return the error of an override whose key a composed config does not have, or has already."""
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
            adds = f"Its keys are {among(keys)}: write {line.key}.{keys[0]}={line.value_text}"
            return _error(line.key, f"{_short(line.text)}, one value for a mapping", "a value that fits", adds)
        return _error(line.key, IS_THERE, "= to change it", f"Write {line.text[1:]}")
    is_merged = line.sign == "" and not line.is_sweep and isinstance(line.value, dict) and isinstance(node, DictConfig)
    if is_merged and not ("_target_" in line.value and "_target_" in node) and adds_keys(node, line.value):
        fix = f"Write '+{line.text}', which adds to the mapping"
        return _error(line.key, f"{_short(line.text)}, with keys that are not there", "a value that fits", fix)
    if line.sign == "~" and line.value not in (None, "", node):
        return _error(line.key, f"{line.value_text}, and the value is {node}", "the value that is there")
    return None


def _habit_error(line: Line, fix: str) -> ErrorDetails:
    """An error for a key of other programs. fix: what is written here, or why nothing is."""
    got = "this key has another name here" if fix.startswith("Write") else "there is no such key here"
    return _error(line.key, got, "a key of exp", fix)


def _missing_key_error(
    line: Line, config: DictConfig, vocabulary: Vocabulary, *, parent: str, node: object
) -> ErrorDetails:
    """Return the error of a key that the composed config does not hold.

    parent: the longest beginning of the key that is there. node: its value.
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
        # A mapping by names, such as precision.keep: what is not there is added.
        fix = f"To add it, write +{line.text}"
    elif near or elsewhere:
        fix = f"Did you mean {f'{parent}.' if parent else ''}{near[0]}?" if near else f"Did you mean {elsewhere[0]}?"
    if isinstance(node, DictConfig) and "_target_" in siblings and line.sign == "":
        fix = f"{fix + ' ' if fix else ''}To pass {last} on to {node['_target_']}, write +{line.text}"
    where = f"one of {among(siblings, word=word)}" if siblings else f"nothing below {parent}"
    return _error(line.key, NO_SUCH_KEY, where, fix)


def _exposed_error(text: str, secret: str) -> ErrorDetails:
    key = mask_secrets(text).lstrip("+~").partition("=")[0]
    fix = f"Write it in single quotes, for the shell to leave it alone: '{mask_secrets(text)}'"
    return _error(key, f"the value of {secret}", "its name, for a command is written down", fix)


def _syntax_error(text: str, error: Exception) -> ErrorDetails:
    typed, sign, value = text.lstrip("+~").partition("=")
    key, short = _short(typed), _short(text)
    if isinstance(error, RecursionError):
        return _error(key, "nested too deeply", "a value of a few levels")
    if not sign:
        pair = re.fullmatch(r"[+~]*([\w.]+):(.+)", text)
        fix = f"Write {pair[1]}={pair[2]}" if pair else "Flags begin with -, see --help"
        return _error(key, f"{short!r} has no =", "key=value", SUBCOMMANDS.get(text) or fix)
    if not KEY.fullmatch(typed):
        near = ".".join(re.findall(r"[\w$-]+", typed, re.ASCII))
        meant = f"Did you mean {_short(f'{near}={value}')}?" if KEY.fullmatch(near) else None
        return _error(key or "=", f"{short!r} begins with no key", "names joined by points, or a group's", meant)
    called = re.match(r"(\w+)\(", value)
    if called and called[1] not in FORMS:
        near_forms = ["tag"] if "log" in called[1].lower() else find_nearest(called[1], FORMS) or ["interval"]
        got = f"{short!r} cannot be read: there is no {called[1]}(...)"
        return _error(key, got, f"one of {', '.join(FORMS)}", f"Write {FORMS[near_forms[0]]}")
    message = str(error).split("\nSee ")[0].splitlines()
    problem = next((line for line in message if not line.startswith("Error parsing over")), type(error).__name__)
    got = f"{short!r} cannot be read: {re.sub(r'.* while evaluating .*?: ', '', problem)[:120]}"
    if called:
        return _error(key, got, FORMS[called[1]])
    if "," in value and not re.search(r"[\[\]{}()'\"]", value):
        rest = ",".join(filter(None, value.split(",")))
        without = f"Write {_short(f'{key}={rest}')}" if rest else None
        return _error(key, f"{short!r} has a comma without a value", "a value on both sides of each comma", without)
    return _error(key, got, "key=value", f"Quote a value with spaces or signs twice: '{key}=\"...\"'")


def _error(key: str, got: str, expected: str, fix: str | None = None) -> ErrorDetails:
    return ErrorDetails(key=key.strip() or "overrides", got=got, expected=expected, fix=fix, source=COMMAND_LINE)


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
