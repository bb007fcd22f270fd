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

import functools
import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from exp.commands import COMMANDS, HYDRA_FLAGS, PATH, Command
from exp.config.group_kinds import MANY, ONE
from exp.output import exit_status

if TYPE_CHECKING:
    from exp.composed_keys import Keys

# Of Hydra's own groups, those that exp reads.
HYDRA_GROUPS = {"hydra/launcher": "exp|slurm|ray", "hydra/sweeper": "exp"}
# A key whose value is a file or a folder, by the end of its name.
PATHS = re.compile(
    r"(^|[._])(path|paths|file|files|folder|dir|directory|root)$|^(resume|sweep\.resume|weights\.from|from_run)$"
)
# What bash would take for more than a letter of a file's name.
ESCAPED = re.compile(r"[ \t\\'\"`$&;()<>|*?!#]")
# Behind these more of the same word is to come.
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
    """stem: what of the word stays as it is typed. names: what may stand behind it, each a whole word with it."""

    stem: str
    names: Sequence[str]


NOTHING = Found("", ())


class Typed(NamedTuple):
    """What a command line says of a config beside the word that is completed."""

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
        """The config groups: each is a folder of YAML files in a place of configs."""
        found = {entry.name for place in self._places() for entry in os.scandir(place) if entry.is_dir()}
        return sorted(name for name in found if self.options(name, ""))

    def options(self, group: str, below: str) -> list[str]:
        """The options of a group, the user's own first, and folders of more of them with a / at the end.

        below: such a folder within the group, with its /.
        """
        found: list[str] = []
        for place in self._places():
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

    def top(self) -> dict[str, object]:
        """The keys at the top of the primary configs, the user's own and exp's, with what is below them."""
        # Not exp's own reader, which brings OmegaConf: half of the time of a key.
        import yaml

        found: dict[str, object] = {}
        loader = vars(yaml).get("CSafeLoader", yaml.SafeLoader)
        for place, name in itertools.product(self._places(), dict.fromkeys((self.config_name, "train"))):
            try:
                with open(os.path.join(place, f"{name}.yaml"), encoding="utf-8") as file:
                    content = yaml.load(file, loader)
            except (OSError, ValueError, yaml.YAMLError):  # it is not there, or the command itself tells what is wrong
                continue
            found = {**content, **found} if isinstance(content, dict) else found
        return {str(key): value for key, value in found.items() if key != "defaults"}

    def keys(self, asked: str) -> Keys:
        """The keys of the config that the line makes. asked: the one of which something is to be known."""
        from exp.composed_keys import keys_of

        return keys_of(self.overrides, config_dir=self.config_dir, config_name=self.config_name, asked=asked)

    def _places(self) -> Sequence[str]:
        return _places_of(self.config_dir)


@functools.cache
def _places_of(config_dir: str | None) -> Sequence[str]:
    from exp.config.search_path import search_places

    return [str(place.directory) for place in search_places(config_dir=config_dir)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script of a shell. Returns: 0; 2 where there is none for it."""
    return exit_status(lambda: _command(list(sys.argv[1:] if argv is None else argv)))


def _command(argv: Sequence[str]) -> int:
    if len(argv) == 5 and argv[0] == "answer":
        # Asked by the scripts: the shell, what it will put a completion in the place of, the line before and behind.
        _, shell, replaced, before, behind = argv
        lines = answer(shell, replaced, before, behind)
        print("".join(f"{line}\n" for line in lines), end="", flush=True)
        compose_ahead(before, behind)
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
    """What a script is to offer.

    replaced: for bash, the end of the word that it replaces. before, behind: the line on both sides of the cursor.
    Returns: for bash each completion in the place of `replaced`; for zsh the last sign of what stays of the word, then
        what may follow it.
    """
    words, current, quote = _split(before)
    found = completed(words, current, _split(behind.partition(" ")[2] + " ")[0])
    names = [name for name in dict.fromkeys(found.names) if f"{found.stem}{name}".startswith(current)]
    if len(names) == 1 and _is_in_list(found.stem):
        names = [f"{names[0]},", f"{names[0]}]"]
    if shell == "zsh":
        return [found.stem[-1:], *names] if names else []
    plain = replaced if quote else _split(replaced)[1]
    kept = len(current) - len(plain) if current.endswith(plain) else 0
    whole = [f"{found.stem}{name}"[kept:] for name in names]
    if quote and len(whole) == 1 and whole[0].endswith(OPEN):
        whole.append(f"{whole[0]}...")  # of one word alone bash would close the quotes
    return whole if quote else [ESCAPED.sub(r"\\\g<0>", word) for word in whole]


def compose_ahead(before: str, behind: str) -> None:
    """Let a process of its own compose what the next key is likely to be asked of, while a person goes on typing.

    That is where a tab has completed a command, or the option of a group, and takes next to nothing unless the keys are
    known to Hydra alone.
    """
    words, current, _ = _split(before)
    found = completed(words, current, ())
    whole = [word for name in found.names if (word := f"{found.stem}{name}").startswith(current)]
    name, rest = _command_of([*words, *whole])
    command = COMMANDS.get(name)
    if len(whole) != 1 or command is None or not command.has_overrides:
        return
    typed = Typed.of([*(rest or ()), *_split(f"{behind} ")[0]])
    if "=" in whole[0] and whole[0].partition("=")[0].lstrip("+") not in typed.groups():
        return
    if os.fork() == 0:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)  # the shell waits for the end of what is written
        os.setsid()
        try:
            typed.keys("")
        finally:
            os._exit(0)


def _is_in_list(stem: str) -> bool:
    return "=[" in stem and stem[-1] in "[,"


def _split(text: str) -> tuple[list[str], str, str]:
    """The whole words of the beginning of a command line and the one at its end, without quotes, and the open quote."""
    end = "\0"
    for quote in ("", "'", '"'):
        try:
            *words, current = shlex.split(f"{text}{end}{quote}")
        except ValueError:  # within another kind of quotes
            continue
        return words, current.removesuffix(end), quote
    return [], "", ""


def completed(words: Sequence[str], current: str, behind: Sequence[str] = ()) -> Found:
    """What may stand in the place of the last word.

    words: before it, the program included. behind: those that stand behind it.
    """
    name, rest = _command_of(words)
    if rest is None:
        return _of_program(words, current)
    if name == "":
        return Found("", [*COMMANDS, "help", "--help", "--version"])
    if name == "help":
        return Found("", list(COMMANDS))
    command = COMMANDS.get(name)
    if command is None:
        return NOTHING
    flags = dict(_divided(flag) for flag in (*command.flags, *(HYDRA_FLAGS if command.has_overrides else ("--help",))))
    flag, sign, value = current.partition("=")
    if sign and flags.get(flag) is not None:
        return _of_words(str(flags[flag]), value, behind=f"{flag}=")
    if rest and flags.get(rest[-1]) is not None:
        return _of_words(str(flags[rest[-1]]), current, behind="")
    if current.startswith("-"):
        return Found("", sorted(flags))
    return _of_command(command, Typed.of([*rest, *behind]), current, is_first=not rest)


def _divided(flag: str) -> tuple[str, str | None]:
    """A flag and the words of its value; None for one that takes none."""
    name, sign, words = flag.partition("=")
    return name, words if sign else None


def _command_of(words: Sequence[str]) -> tuple[str, list[str] | None]:
    """The command that a line names, and the words behind it; "" where it is to come, None where no exp is there."""
    for index, word in enumerate(words):
        is_module = index > 0 and words[index - 1] == "-m"
        if is_module and word.startswith("exp."):
            return word.removeprefix("exp."), list(words[index + 1 :])
        if (is_module and word == "exp") or os.path.basename(word) == "exp":
            rest = list(words[index + 1 :])
            return (rest[0], rest[1:]) if rest else ("", [])
    return "", None


def _of_program(words: Sequence[str], current: str) -> Found:
    """Of `python -m exp...`, while the module is typed."""
    if words[-1:] == ["-m"]:
        return Found("", ["exp", *(command.module for command in COMMANDS.values())])
    return NOTHING


def _of_command(command: Command, typed: Typed, current: str, *, is_first: bool) -> Found:
    key, sign, value = current.partition("=")
    if sign and key in command.keys:
        return _of_words(command.keys[key], value, behind=f"{key}=")
    if command.module == "exp.why" and is_first:
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
    """What may stand behind a key or a flag of a command's own."""
    alternatives = words.split("|") if words else []
    if "experiment" in alternatives:
        return Found(behind, [name for name in Typed.of([]).options("experiment", "") if not name.endswith("/")])
    names = [word for word in alternatives if word != PATH]
    return Found(behind, [*names, *(_files(current) if PATH in alternatives else ())])


def _files(typed: str) -> list[str]:
    """The files and folders that a path may go on to, as it is typed."""
    name = typed.rpartition("/")[2]
    head = typed[: len(typed) - len(name)]
    try:
        entries = sorted(os.scandir(os.path.expanduser(head) or "."), key=lambda entry: entry.name)
    except OSError:
        return []
    shown = [entry for entry in entries if entry.name.startswith(name) and (name or not entry.name.startswith("."))]
    return [f"{head}{entry.name}{'/' if entry.is_dir() else ''}" for entry in shown]


def _of_override(current: str, typed: Typed) -> Found:
    """What may stand in the place of an override: a group, a key, or the value of one."""
    key, sign, value = current.partition("=")
    plus = key[: len(key) - len(key.lstrip("+~"))]
    name = key[len(plus) :]
    if sign:
        return _of_value(name, value, stem=f"{key}=", typed=typed)
    parent, dot, _ = name.rpartition(".")
    if dot:
        below = typed.keys(parent).below(parent)
        return Found(f"{plus}{parent}.", [_open_key(one, below[one], plus) for one in below])
    groups = [*typed.groups(), *(HYDRA_GROUPS if name.startswith("hydra") else ())]
    if plus == "~":
        return Found(plus, [f"{group}." for group in groups if group in MANY])
    shown = [f"{group}=" for group in groups if not plus or group not in ONE]
    shown += [f"{group}." for group in groups if group in (*ONE, *MANY)]
    shown += [_open_key(one, node or None, plus) for one, node in typed.top().items()]
    return Found(plus, [*shown, *(["from_run="] if not plus else [])])


def _open_key(name: str, node: object, plus: str) -> str:
    if plus == "~":
        return name
    return f"{name}." if isinstance(node, dict) else f"{name}="


def _of_value(key: str, value: str, *, stem: str, typed: Typed) -> Found:
    # Of a list, or of the values of a sweep, it is the last; what stands before it is not offered again.
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
    keys = typed.keys(key)
    if key == "monitor":
        return Found(stem, ["loss/val", *(f"{metric}/val" for metric in keys.below("metrics"))])
    return Found(kept, [word for word in keys.words_of(key) if word not in before])


if __name__ == "__main__":
    sys.exit(main())
