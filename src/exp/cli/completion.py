"""exp completion bash|zsh: print the script for tab completion of `exp`.

In this shell:
    eval "$(exp completion bash)"
    eval "$(exp completion zsh)"
In every new shell:
    exp completion bash > ~/.exp-completion.bash && echo 'source ~/.exp-completion.bash' >> ~/.bashrc
    exp completion zsh > ~/.exp-completion.zsh && echo 'source ~/.exp-completion.zsh' >> ~/.zshrc

The script completes commands, flags, groups, options, keys of the composed config, and the values true and false. If
there is no completion, the shell proposes files.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Sequence

from exp.cli.commands import COMMANDS, HYDRA_FLAGS, PATH
from exp.config.plain_tree import value_at
from exp.config.search_path import OWN_CONF, options_in, search_places
from exp.config.slots import COLLECTIONS, NODES, ONE, PHASES
from exp.config.yaml_files import read_yaml
from exp.output import command

# The script runs the program exp that it finds on PATH, never a file of the working directory.
BASH = r"""_exp_complete() {
    local line program="$(type -P exp)"
    COMPREPLY=()
    [[ "$1" == exp && "$program" == /* ]] || return
    while IFS= read -r line; do
        COMPREPLY+=("$line")
    done < <("$program" completion answer "$2" "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=.,/[] ]] && compopt -o nospace 2>/dev/null
}
complete -o default -o nosort -F _exp_complete exp
"""
ZSH = r"""_exp() {
    local program=${commands[exp]}
    local -a found open closed
    [[ $words[1] == exp && $program == /* ]] || return 1
    found=("${(@f)$($program completion answer "$PREFIX" "${(j: :)words[1,CURRENT-1]} $QIPREFIX$PREFIX" 2>/dev/null)}")
    open=(${(M)found:#*[=.,\[/]}) closed=(${found:#*[=.,\[/]})
    (( $#open )) && compadd -V exp -S '' -a open
    (( $#closed )) && compadd -V exp -a closed
    (( $#open + $#closed )) || { compset -P '*='; _files }
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _exp exp
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH}


@command()
def main(argv: Sequence[str]) -> int:
    """Print a shell's completion script, or the completions of a command line if such a script calls this command.

    Returns:
        Exit status: 0, or 2 for unknown arguments.
    """
    if len(argv) == 3 and argv[0] == "answer":
        # The scripts pass the text that the shell will replace, and the command line up to the cursor.
        print("".join(f"{line}\n" for line in answer(*argv[1:])), end="")
    elif list(argv) in (["-h"], ["--help"]):
        print(__doc__)
    elif len(argv) == 1 and argv[0] in SCRIPTS:
        print(SCRIPTS[argv[0]], end="")
    else:
        got = " ".join(argv) or "nothing"
        print(f"exp completion: {got}; expected bash or zsh, as in exp completion bash", file=sys.stderr)
        return 2
    return 0


def answer(replaced: str, before: str) -> list[str]:
    """Return the possible completions of a command line. The shell replaces the text `replaced` by a completion.

    Args:
        replaced: Text directly before the cursor. In bash it begins after the last `=`.
        before: Command line up to the cursor.
    """
    words, current, quote = _split(before)
    plain = replaced if quote else _split(replaced)[1]
    kept = len(current) - len(plain) if current.endswith(plain) else 0
    return [word[kept:] for word in dict.fromkeys(complete(words[1:], current)) if word.startswith(current)]


def _split(text: str) -> tuple[list[str], str, str]:
    """Split the beginning of a command line into words.

    Returns:
        Three values: the complete words; the last word, which may be incomplete, without quotes; and the quote that is
        open at the end, or an empty text.
    """
    end = "\0"
    for quote in ("", "'", '"'):
        try:
            *words, current = shlex.split(f"{text}{end}{quote}")
        except ValueError:  # another quote is open
            continue
        return words, current.removesuffix(end), quote
    return [], "", ""


def complete(words: Sequence[str], current: str) -> Sequence[str]:
    """Return the completions of the last word of a command line.

    Args:
        words: Words between `exp` and the last word.
        current: Last word, which may be incomplete.
    """
    if not words or words[0] == "help":
        return [*COMMANDS, "help", "--help", "--version"] if not words else list(COMMANDS)
    if words[0] not in COMMANDS:
        return ()
    command, rest = COMMANDS[words[0]], list(words[1:])
    own = (*command.flags, *(HYDRA_FLAGS if command.has_overrides else ("--help",)))
    values = dict(flag.split("=") for flag in own if "=" in flag) | command.keys
    key, sign, _ = current.partition("=")
    if rest and rest[-1] in values:
        return _words(values[rest[-1]])
    if sign and key in values:
        return [f"{key}={word}" for word in _words(values[key])]
    if current.startswith("-"):
        return sorted(flag.partition("=")[0] for flag in own)
    keys = [f"{name}=" for name in command.keys]
    if not command.has_overrides or (command.words and not rest):
        return [*_words(command.words), *keys]
    found = complete_override(current, [word for word in rest if "=" in word])
    return [word.removesuffix("=") for word in found] if command.module == "cli.why" and not rest else [*keys, *found]


def _words(alternatives: str) -> list[str]:
    """Return the values in a text `A|B` of the command table.

    PATH is not a value, because the shell completes the names of files.
    """
    if alternatives == "experiment":
        return options_of("experiment")
    return [word for word in alternatives.split("|") if word and word != PATH]


def complete_override(current: str, overrides: Sequence[str]) -> list[str]:
    """Return the completions of an incomplete override: groups, keys, or values of a key.

    Args:
        current: Incomplete override.
        overrides: Overrides before `current` in the command line. They select the config.
    """
    typed, sign, value = current.partition("=")
    name = typed.lstrip("+")
    plus = typed[: len(typed) - len(name)]
    parent, dot, last = name.rpartition(".")
    if sign:
        # In a list, the last entry is completed. Earlier entries are not proposed again.
        *before, end = re.split(r"[\[,]", value)
        start, ends = current.removesuffix(end), [",", "]"] if "[" in value else [""]
        is_switch = isinstance(keys_below(parent, overrides).get(last), bool)
        found = options_of(name) or (["true", "false"] if is_switch else [])
        return [f"{start}{word}{end}" for word in found if word not in before for end in ends]
    start = f"{plus}{parent}{dot}"
    keys = [
        f"{start}{key}{'.' if isinstance(value, dict) and value else '='}"
        for key, value in keys_below(parent, overrides).items()
    ]
    if dot:
        return keys
    groups = [f"{plus}{group}=" for group in all_groups() if not plus or group not in ONE]
    return [*groups, *keys, *([] if plus else ["from_run="])]


def all_groups() -> list[str]:
    """Return the config groups: folders with YAML files in the directories of configs."""
    folders = (path for place in search_places() for path in place.directory.iterdir())
    return sorted({path.name for path in folders if path.is_dir() and options_in(path)})


def options_of(group: str) -> list[str]:
    """Return the options of a group. The user's options come first."""
    return list(dict.fromkeys(option for place in search_places() for option in options_in(place.directory / group)))


def keys_below(parent: str, overrides: Sequence[str]) -> dict[str, object]:
    """Return the values directly below a dotted key of the config, by name.

    Args:
        parent: Dotted key. An empty text is the top level of the config.
        overrides: Overrides that select the config.
    """
    # At the top level, the keys are read from train.yaml, because composing the config takes longer.
    if not parent:
        content = read_yaml(OWN_CONF / "train.yaml")
        own = {str(key): value for key, value in content.items() if key not in ("defaults", "hydra")}
        return {**own, **{name: {"": None} for name in (*NODES, *COLLECTIONS, PHASES)}}
    from exp.check.stages import compose
    from exp.config.reading import raw_values
    from exp.errors import ExpError

    names = (*all_groups(), "from_run")
    choices = [word for word in overrides if word[0] in "+~" or word.partition("=")[0] in names]
    for chosen in (choices, ()):
        with contextlib.suppress(ExpError):  # the command reports the error when it is run
            found = value_at(raw_values(compose(chosen)), parent)
            return found if isinstance(found, dict) else {}
    return {}
