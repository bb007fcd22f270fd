"""exp completion bash|zsh: prints the script by which the tab key completes what is typed behind exp.

In this shell:
    eval "$(exp completion bash)"
    eval "$(exp completion zsh)"
In each one from now on:
    exp completion bash > ~/.exp-completion.bash && echo 'source ~/.exp-completion.bash' >> ~/.bashrc
    exp completion zsh > ~/.exp-completion.zsh && echo 'source ~/.exp-completion.zsh' >> ~/.zshrc

Commands, groups, their options, keys of the config as far as it is typed, the values that a key may have, flags and
files; behind `python -m exp.train` as behind `exp train`. The script asks the exp that the line names, where that is
found on PATH or in the active environment; it runs no other file.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shlex
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from exp.cli.commands import COMMANDS, HYDRA_FLAGS, PATH, Command
from exp.config.plain_tree import leaves
from exp.config.slots import MANY, ONE
from exp.files import write_whole
from exp.output import exit_status

# Of Hydra's own groups, those that exp reads.
HYDRA_GROUPS = {"hydra/launcher": "exp|slurm|ray", "hydra/sweeper": "exp"}
# A key whose value is a file or a folder, by the end of its name.
PATHS = re.compile(
    r"(^|[._])(path|paths|file|files|folder|dir|directory|root)$|^(resume|sweep\.resume|weights\.from|from_run)$"
)
# What bash would take for more than a letter of a file's name.
ESCAPED = re.compile(r"[ \t\\'\"`$&;()<>|*?!#]")
# The kinds of keys.
NODE, SWITCH, VALUE = "node", "switch", "value"
SEVERAL = re.compile(r"(\+?[\w/]+=[\w/]+)(,[\w/]+)+")
# Command lines whose keys are kept.
MOST_KEPT = 30
# After these characters the word goes on.
OPEN = ("=", ".", ",", "[", "/")
BASH = r"""# Tab completion of exp for bash, made by `exp completion bash`.
_exp_complete() {
    local program line
    COMPREPLY=()
    _exp_program "${COMP_WORDS[0]/#\~/$HOME}" || return
    local -a ask=("$program" completion)
    # -P: nothing of the working directory is imported.
    [[ "${program##*/}" == python* ]] && ask=("$program" -P -m exp completion)
    while IFS= read -r line; do
        COMPREPLY+=("$line")
    done < <("${ask[@]}" answer bash "$2" "${COMP_LINE:0:COMP_POINT}" "${COMP_LINE:COMP_POINT}" 2>/dev/null)
    compopt -o nosort 2>/dev/null
    if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=.,\[/] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
# The file that the line runs, where PATH or the active environment has it: a tab runs no file of the working directory.
_exp_program() {
    local folder name="${1##*/}"
    local -a folders
    IFS=: read -ra folders <<< "$PATH:${VIRTUAL_ENV:+$VIRTUAL_ENV/bin}:${CONDA_PREFIX:+$CONDA_PREFIX/bin}"
    for folder in "${folders[@]}"; do
        [[ "$folder" == /* && -f "$folder/$name" && -x "$folder/$name" ]] || continue
        [[ "$1" != */* || "${1%/*}" -ef "$folder" ]] || continue
        program="$folder/$name"
        return
    done
    return 1
}
# Of Python it answers for exp alone; all else is for what answered before.
_exp_complete_python() {
    if [[ " $COMP_LINE " == *" -m exp"[.\ ]* ]]; then
        _exp_complete "$@"
        return
    fi
    if [[ -z "$_exp_before" ]]; then
        _exp_before=:
        { _comp_load python || __load_completion python; } &>/dev/null && _exp_note_python
        complete -o bashdefault -o default -F _exp_complete_python python
    fi
    "$_exp_before" "$@"
}
_exp_note_python() {
    local known
    known="$(complete -p python 2>/dev/null)"
    [[ "$known" =~ -F\ ([^ ]+) && "${BASH_REMATCH[1]}" != _exp_* ]] && _exp_before="${BASH_REMATCH[1]}"
}
_exp_before=
_exp_note_python
complete -F _exp_complete exp
complete -o bashdefault -o default -F _exp_complete_python python python3 python3.{11..13}
"""
ZSH = r"""# Tab completion of exp for zsh, made by `exp completion zsh`.
_exp_complete() {
    _exp_complete_line $words[1] "${(j: :)words[1,CURRENT-1]} $QIPREFIX$IPREFIX$PREFIX" " ${(j: :)words[CURRENT+1,-1]}"
}
_exp_complete_line() {
    local program separator
    local -a ask found open closed
    _exp_program ${1/#\~/$HOME} || return 1
    ask=($program completion)
    # -P: nothing of the working directory is imported.
    [[ ${program:t} == python* ]] && ask=($program -P -m exp completion)
    found=("${(@f)$($ask answer zsh '' "$2" "$3" 2>/dev/null)}")
    (( $#found > 1 )) || return 1
    separator=$found[1]
    shift found
    [[ -n $separator ]] && compset -P "*${(b)separator}"
    open=(${(M)found:#*[=.,\[/]}) closed=(${found:#*[=.,\[/]})
    (( $#open )) && compadd -V exp -S '' -a open
    (( $#closed )) && compadd -V exp -a closed
}
# The file that the line runs, where PATH or the active environment has it: a tab runs no file of the working directory.
_exp_program() {
    local folder name=${1:t}
    for folder in $path ${VIRTUAL_ENV:+$VIRTUAL_ENV/bin} ${CONDA_PREFIX:+$CONDA_PREFIX/bin}; do
        [[ $folder == /* && -f $folder/$name && -x $folder/$name ]] || continue
        [[ $1 != */* || ${1:h} -ef $folder ]] || continue
        program=$folder/$name
        return
    done
    return 1
}
# Of Python it answers for exp alone; all else is for what answered before.
_exp_complete_python() {
    if [[ " $words " == *" -m exp"[.\ ]* ]]; then _exp_complete; else $_exp_before[python] "$@"; fi
}
# Behind a bracket without quotes, hooks=[gradients, zsh expects a subscript.
_exp_complete_subscript() {
    local program=${${(z)LBUFFER}[1]}
    if [[ ${program:t} == exp || ( ${program:t} == python* && "$LBUFFER " == *" -m exp"[.\ ]* ) ]]; then
        _exp_complete_line $program $LBUFFER $RBUFFER
    else
        $_exp_before[-subscript-] "$@"
    fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
typeset -gA _exp_before
for _exp_context in python -subscript-; do
    [[ ${_comps[$_exp_context]-} == _exp_* ]] || _exp_before[$_exp_context]=${_comps[$_exp_context]:-_default}
done
unset _exp_context
compdef _exp_complete exp
compdef _exp_complete_python python python3 -P 'python3.*'
compdef _exp_complete_subscript -subscript-
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH}


class Found(NamedTuple):
    """stem: the part of the word that stays as it is typed. names: what may follow it, each a whole word with it."""

    stem: str
    names: Sequence[str]


NOTHING = Found("", ())


class Typed(NamedTuple):
    """The config that a command line asks for, without the word that is completed."""

    overrides: Sequence[str]
    config_dir: str | None
    config_name: str

    @classmethod
    def of(cls, words: Sequence[str]) -> Typed:
        """Read the words of a command, flags among them."""
        flags = {word: value for word, value in itertools.zip_longest(words, words[1:]) if word[:1] == "-"}
        flags |= dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
        config_dir = flags.get("--config-dir") or flags.get("-cd")
        return cls(
            overrides=[word for word in words if word[:1] != "-" and ("=" in word or word[:1] == "~")],
            config_dir=config_dir if config_dir and os.path.isdir(config_dir) else None,
            config_name=flags.get("--config-name") or flags.get("-cn") or "train",
        )

    def groups(self) -> list[str]:
        """Return the config groups: folders of YAML files in a place of configs."""
        found = {entry.name for place in self.places() for entry in os.scandir(place) if entry.is_dir()}
        return sorted(name for name in found if self.options(name, ""))

    def options(self, group: str, below: str) -> list[str]:
        """Return the options of a group, the user's own first, and folders of more of them with a / at the end.

        below: such a folder within the group, with its /.
        """
        found: list[str] = []
        for place in self.places():
            folder = os.path.join(place, group, below)
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name) if os.path.isdir(folder) else []
            for entry in entries:
                if entry.name.startswith(("_", ".")):
                    continue  # a part that options include
                if entry.name.endswith(".yaml"):
                    found.append(entry.name.removesuffix(".yaml"))
                elif entry.is_dir():
                    found.append(f"{entry.name}/")
        return list(dict.fromkeys(found))

    def below(self, parent: str) -> dict[str, str]:
        """Return the names below a dotted key of the config, each with its kind; at the top for an empty key."""
        # At the top every choice has the same keys.
        found = self.kinds(self.choices() if parent else ())
        start = f"{parent}." if parent else ""
        return {
            key.removeprefix(start): kind
            for key, kind in found.items()
            if key.startswith(start) and "." not in key.removeprefix(start)
        }

    def choices(self) -> list[str]:
        """Return the overrides that add keys or remove them: choices of groups, additions, targets."""
        groups = self.groups()
        keys = [(word, word.lstrip("+~").partition("=")[0]) for word in self.overrides]
        chosen = [word for word, key in keys if key in (*groups, "from_run") or word[0] in "+~" or "_target_" in key]
        return [SEVERAL.sub(r"\1", word) for word in chosen]  # of a sweep the first choice

    def kinds(self, choices: Sequence[str]) -> dict[str, str]:
        """Return the kind of each key of a config, from the file of the last command lines, or by composing it."""
        asked = json.dumps([os.getcwd(), self.config_dir, self.config_name, choices, _newest(self.places())])
        kept = _read_kept()
        if asked not in kept:
            kept[asked] = self._composed(choices)
            _keep(dict(list(kept.items())[-MOST_KEPT:]))
        return kept[asked]

    def _composed(self, choices: Sequence[str]) -> dict[str, str]:
        from omegaconf import OmegaConf

        from exp.check.stages import compose
        from exp.errors import ExpError

        try:
            config = compose(choices, config_dir=self.config_dir, config_name=self.config_name)
        except ExpError:  # which the command itself reports
            default = self._replace(config_name="train")
            return default.kinds(()) if choices or default != self else {}
        plain = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
        return {key: _kind(value) for key, value in leaves(plain) if not key.startswith("_composition_")}

    def places(self) -> Sequence[str]:
        return _places_of(self.config_dir)


@functools.cache
def _places_of(config_dir: str | None) -> Sequence[str]:
    from exp.config.search_path import search_places

    return [str(place.directory) for place in search_places(config_dir=config_dir)]


def _kind(value: object) -> str:
    return NODE if isinstance(value, dict) and value else SWITCH if isinstance(value, bool) else VALUE


def _newest(places: Sequence[str]) -> list[int]:
    """Return the number of YAML files in some places, and when the newest of them was written."""
    folders = [(folder, names) for place in places for folder, _, names in os.walk(place)]
    files = [os.path.join(folder, name) for folder, names in folders for name in names if name.endswith(".yaml")]
    return [len(files), max((os.stat(file).st_mtime_ns for file in files), default=0)]


def _kept_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exp" / "completion.json"


def _read_kept() -> dict[str, dict[str, str]]:
    try:
        found = json.loads(_kept_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or it is damaged: it is written again
        return {}
    return found if isinstance(found, dict) else {}


def _keep(kept: dict[str, dict[str, str]]) -> None:
    """Write the keys of the last command lines, without values, which may be secrets."""
    file = _kept_file()
    with contextlib.suppress(OSError):  # where it cannot be written, the next key takes longer
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(file, json.dumps(kept))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script of a shell. Returns: 0; 2 for any other word."""
    return exit_status(lambda: _command(list(sys.argv[1:] if argv is None else argv)))


def _command(argv: Sequence[str]) -> int:
    if len(argv) == 5 and argv[0] == "answer":
        # Called by the scripts: the shell, the text that it replaces, the line before and after the cursor.
        print("".join(f"{line}\n" for line in answer(*argv[1:])), end="")
        return 0
    if list(argv) in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(argv) != 1 or argv[0] not in SCRIPTS:
        got = " ".join(argv) or "nothing"
        print(f"exp completion: {got}; expected bash or zsh: exp completion bash. --help says more", file=sys.stderr)
        return 2
    print(SCRIPTS[argv[0]], end="")
    return 0


def answer(shell: str, replaced: str, before: str, behind: str) -> list[str]:
    """Return what a script offers.

    replaced: for bash, the end of the word that it replaces. before, behind: the line on both sides of the cursor.
    Returns: for bash each completion instead of `replaced`; for zsh the last character of what stays of the word, then
        what may follow it.
    """
    words, current, quote = _split(before)
    found = completed(words, current, _split(behind.partition(" ")[2] + " ")[0])
    names = [name for name in dict.fromkeys(found.names) if f"{found.stem}{name}".startswith(current)]
    if len(names) == 1 and "=[" in found.stem and found.stem[-1] in "[,":
        names = [f"{names[0]},", f"{names[0]}]"]
    if shell == "zsh":
        return [found.stem[-1:], *names] if names else []
    plain = replaced if quote else _split(replaced)[1]
    kept = len(current) - len(plain) if current.endswith(plain) else 0
    whole = [f"{found.stem}{name}"[kept:] for name in names]
    if quote and len(whole) == 1 and whole[0].endswith(OPEN):
        whole.append(f"{whole[0]}...")  # after a single word bash would close the quotes
    return whole if quote else [ESCAPED.sub(r"\\\g<0>", word) for word in whole]


def _split(text: str) -> tuple[list[str], str, str]:
    """Return the whole words of the beginning of a command line, its last word without quotes, and the open quote."""
    end = "\0"
    for quote in ("", "'", '"'):
        try:
            *words, current = shlex.split(f"{text}{end}{quote}")
        except ValueError:  # within another kind of quotes
            continue
        return words, current.removesuffix(end), quote
    return [], "", ""


def completed(words: Sequence[str], current: str, behind: Sequence[str] = ()) -> Found:
    """Return what may stand instead of the last word.

    words: before it, the program included. behind: the words after it.
    """
    name, rest = _command_of(words)
    if rest is None:
        modules = ["exp", *(f"exp.{name}" for name in COMMANDS)]
        return Found("", modules if words[-1:] == ["-m"] else ())
    if name == "":
        return Found("", [*COMMANDS, "help", "--help", "--version"])
    if name == "help":
        return Found("", list(COMMANDS))
    command = COMMANDS.get(name)
    if command is None:
        return NOTHING
    own_flags = (*command.flags, *(HYDRA_FLAGS if command.has_overrides else ("--help",)))
    flags = {flag.partition("=")[0]: flag.partition("=")[2] if "=" in flag else None for flag in own_flags}
    flag, sign, value = current.partition("=")
    if sign and flags.get(flag) is not None:
        return _of_words(str(flags[flag]), value, behind=f"{flag}=")
    if rest and flags.get(rest[-1]) is not None:
        return _of_words(str(flags[rest[-1]]), current, behind="")
    if current.startswith("-"):
        return Found("", sorted(flags))
    return _of_command(command, Typed.of([*rest, *behind]), current, is_first=not rest)


def _command_of(words: Sequence[str]) -> tuple[str, list[str] | None]:
    """Return the command of a line, empty if none is typed yet, and the words after it; None for a line without exp."""
    for index, word in enumerate(words):
        is_module = index > 0 and words[index - 1] == "-m"
        if is_module and word.startswith("exp."):
            return word.removeprefix("exp."), list(words[index + 1 :])
        if (is_module and word == "exp") or os.path.basename(word) == "exp":
            rest = list(words[index + 1 :])
            return (rest[0], rest[1:]) if rest else ("", [])
    return "", None


def _of_command(command: Command, typed: Typed, current: str, *, is_first: bool) -> Found:
    key, sign, value = current.partition("=")
    if sign and key in command.keys:
        return _of_words(command.keys[key], value, behind=f"{key}=")
    if command.module == "cli.why" and is_first:
        found = _of_override(current, typed)
        return Found(found.stem, [name.removesuffix("=") for name in found.names])
    own = [f"{name}=" for name in command.keys]
    takes_word = command.words and (is_first or not command.has_overrides) and not sign
    alone = _of_words(command.words, current, behind="") if takes_word else NOTHING
    if not command.has_overrides or (is_first and command.words):
        return alone if alone.names else Found("", own)
    found = _of_override(current, typed)
    return Found(found.stem, [*own, *found.names]) if not found.stem else found


def _of_words(words: str, current: str, *, behind: str) -> Found:
    """Return what may follow a key or a flag of a command's own."""
    alternatives = words.split("|") if words else []
    if "experiment" in alternatives:
        return Found(behind, [name for name in Typed.of([]).options("experiment", "") if not name.endswith("/")])
    names = [word for word in alternatives if word != PATH]
    return Found(behind, [*names, *(_files(current) if PATH in alternatives else ())])


def _files(typed: str) -> list[str]:
    """Return the files and folders whose paths begin as it is typed."""
    name = typed.rpartition("/")[2]
    head = typed[: len(typed) - len(name)]
    try:
        entries = sorted(os.scandir(os.path.expanduser(head) or "."), key=lambda entry: entry.name)
    except OSError:
        return []
    shown = [entry for entry in entries if entry.name.startswith(name) and (name or not entry.name.startswith("."))]
    return [f"{head}{entry.name}{'/' if entry.is_dir() else ''}" for entry in shown]


def _of_override(current: str, typed: Typed) -> Found:
    """Return what may stand instead of an override: a group, a key, or the value of one."""
    key, sign, value = current.partition("=")
    plus = key[: len(key) - len(key.lstrip("+~"))]
    name = key[len(plus) :]
    if sign:
        return _of_value(name, value, stem=f"{key}=", typed=typed)
    parent, dot, _ = name.rpartition(".")
    if dot:
        return Found(f"{plus}{parent}.", _open_keys(typed.below(parent), plus))
    groups = [*typed.groups(), *(HYDRA_GROUPS if name.startswith("hydra") else ())]
    if plus == "~":
        return Found(plus, [f"{group}." for group in groups if group in MANY])
    shown = [f"{group}=" for group in groups if not plus or group not in ONE]
    shown += _open_keys(typed.below(""), plus)
    return Found(plus, [*shown, *(["from_run="] if not plus else [])])


def _open_keys(kinds: Mapping[str, str], plus: str) -> list[str]:
    if plus == "~":
        return list(kinds)
    return [f"{name}." if kind == NODE else f"{name}=" for name, kind in kinds.items()]


def _of_value(key: str, value: str, *, stem: str, typed: Typed) -> Found:
    # In a list, and among the values of a sweep, it is the last; those before it are not offered again.
    *before, last = re.split(r"[\[,]", value)
    kept = f"{stem}{value[: len(value) - len(last)]}"
    if key in HYDRA_GROUPS:
        return Found(kept, [word for word in HYDRA_GROUPS[key].split("|") if word not in before])
    if key in typed.groups():
        head = last[: last.rfind("/") + 1]
        options = [f"{head}{option}" for option in typed.options(key, head)]
        opening = ["["] if key in MANY and value == "" and options else []
        return Found(kept, [*(option for option in options if option not in before), *opening])
    if PATHS.search(key):
        return Found(stem, [*(["auto"] if key in ("resume", "sweep.resume") else []), *_files(value)])
    if key == "monitor":
        return Found(stem, ["loss/val", *(f"{metric}/val" for metric in typed.below("metrics"))])
    return Found(kept, [word for word in _words_of(key, typed) if word not in before])


def _words_of(key: str, typed: Typed) -> list[str]:
    """Return the words that the value of a key may be, if exp declares them or the value is true or false."""
    from exp.check.keys import SCHEMA, VALUES

    declared: Any = SCHEMA
    for part in key.split("."):
        declared = declared.get(part) if isinstance(declared, dict) else None
    words = list(dict.fromkeys(_literals(VALUES.get(key) if declared is None else declared)))
    parent, _, name = key.rpartition(".")
    is_switch = not words and typed.below(parent).get(name) == SWITCH
    return ["true", "false"] if is_switch else words


def _literals(declared: Any) -> Iterator[str]:
    """Yield the words of a Literal, of true and false, and null among them, of a declared type."""
    arguments = typing.get_args(declared)
    if declared is bool:
        yield from ("true", "false")
    elif typing.get_origin(declared) is Literal:
        yield from map(str, arguments)
    elif typing.get_origin(declared) is typing.Annotated:
        yield from _literals(arguments[0])
    elif typing.get_origin(declared) in (typing.Union, types.UnionType):
        words = [word for one in arguments for word in _literals(one)]
        yield from [*words, *(["null"] if words and type(None) in arguments else [])]
