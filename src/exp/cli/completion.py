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

import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import NamedTuple

from exp.cli.commands import COMMANDS, HYDRA_FLAGS, PATH
from exp.config.plain_tree import leaves
from exp.config.search_path import OWN_CONF, options_in, search_places
from exp.config.slots import COLLECTIONS, MANY, NODES, ONE, PHASES
from exp.config.yaml_files import read_yaml
from exp.output import command

# Hydra's own groups that exp reads.
HYDRA_GROUPS = {"hydra/launcher": ["exp", "slurm", "ray"], "hydra/sweeper": ["exp"]}
# Kinds of values in a config: a mapping, a boolean, any other value.
NODE, SWITCH, VALUE = "node", "switch", "value"
SEVERAL = re.compile(r"(\+?[\w/]+=[\w/]+)(,[\w/]+)+")
# The script runs the program exp found on PATH, never a file of the working directory.
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
    """Print the completion script of a shell, or the completions of a command line for such a script.

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
        print(f"exp completion: {got}; expected bash or zsh: exp completion bash. --help says more", file=sys.stderr)
        return 2
    return 0


def answer(replaced: str, before: str) -> list[str]:
    """Return the completions of a command line, as texts that replace `replaced`.

    Args:
        replaced: Text before the cursor that the shell replaces by a completion. In bash it begins after the last `=`.
        before: Command line up to the cursor.
    """
    words, current, quote = _split(before)
    plain = replaced if quote else _split(replaced)[1]
    kept = len(current) - len(plain) if current.endswith(plain) else 0
    return [word[kept:] for word in dict.fromkeys(complete(words[1:], current)) if word.startswith(current)]


def _split(text: str) -> tuple[list[str], str, str]:
    """Split the beginning of a command line into words.

    Returns:
        The complete words.
        The last word, which may be incomplete, without quotes.
        The quote that is open at the end, or "".
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
    values = dict(flag.split("=") for flag in own if "=" in flag)
    key, sign, _ = current.partition("=")
    if rest and rest[-1] in values:
        return _words(values[rest[-1]])
    if sign and key in values:
        return [f"{key}={word}" for word in _words(values[key])]
    if current.startswith("-"):
        return sorted(flag.partition("=")[0] for flag in own)
    if sign and key in command.keys:
        return [f"{key}={word}" for word in _words(command.keys[key])]
    alone = [] if sign or (rest and command.has_overrides) else _words(command.words)
    if command.module == "cli.why" and not rest:
        return [word.removesuffix("=") for word in Typed.of(rest).words(current)]
    if not command.has_overrides or (command.words and not rest):
        return [*alone, *(f"{name}=" for name in command.keys)]
    return [*(f"{name}=" for name in command.keys), *Typed.of(rest).words(current)]


def _words(alternatives: str) -> list[str]:
    """Return the values in a text `A|B` of the command table. PATH has no values, because the shell completes files."""
    if alternatives == "experiment":
        return Typed.of([]).options("experiment")
    return [word for word in alternatives.split("|") if word and word != PATH]


class Typed(NamedTuple):
    """The config that a command line selects, ignoring the word that is being completed.

    Args:
        overrides: Overrides before the last word.
        config_dir: Directory of --config-dir, if it exists.
        config_name: Name of the primary config.
    """

    overrides: Sequence[str]
    config_dir: str | None
    config_name: str

    @classmethod
    def of(cls, words: Sequence[str]) -> Typed:
        """Return the config that the words of a command line select."""
        flags = {word: value for word, value in itertools.zip_longest(words, words[1:]) if word[:1] == "-"}
        flags |= dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
        config_dir = flags.get("--config-dir") or flags.get("-cd")
        return cls(
            overrides=[word for word in words if word[:1] != "-" and ("=" in word or word[:1] == "~")],
            config_dir=config_dir if config_dir and os.path.isdir(config_dir) else None,
            config_name=flags.get("--config-name") or flags.get("-cn") or "train",
        )

    def words(self, current: str) -> list[str]:
        """Return the completions of an incomplete override: groups, keys, or values of a key."""
        typed, sign, value = current.partition("=")
        name = typed.lstrip("+~")
        plus = typed[: len(typed) - len(name)]
        if sign:
            # In a list or a sweep, the last value is completed. The values before it are not proposed again.
            *before, last = re.split(r"[\[,]", value)
            start = f"{typed}={value[: len(value) - len(last)]}"
            ends = [",", "]"] if "[" in value else [""]
            return [f"{start}{word}{end}" for word in self.values(name) if word not in before for end in ends]
        parent, dot, _ = name.rpartition(".")
        if dot:
            start = f"{plus}{parent}."
            return [f"{start}{end}" for end in _ends(self.below(parent), plus)]
        groups = [*self.groups(), *(HYDRA_GROUPS if name.startswith("hydra") else ())]
        if plus == "~":
            return [f"~{group}." for group in groups if group in MANY]
        found = [f"{plus}{group}=" for group in groups if not plus or group not in ONE]
        return [*found, *(f"{plus}{end}" for end in _ends(self.below(""), plus)), *([] if plus else ["from_run="])]

    def groups(self) -> list[str]:
        """Return the config groups: folders with YAML files in the directories of configs."""
        folders = (path for place in search_places(config_dir=self.config_dir) for path in place.directory.iterdir())
        return sorted({path.name for path in folders if path.is_dir() and options_in(path)})

    def options(self, group: str) -> list[str]:
        """Return the options of a group. The user's options come first."""
        places = search_places(config_dir=self.config_dir)
        return list(dict.fromkeys(option for place in places for option in options_in(place.directory / group)))

    def values(self, key: str) -> list[str]:
        """Return the values to propose for a key: options of a group, or true and false for a boolean."""
        if key in HYDRA_GROUPS:
            return HYDRA_GROUPS[key]
        parent, _, name = key.rpartition(".")
        kinds = self.below(parent)
        is_switch = name in kinds and kinds[name] == SWITCH
        return self.options(key) or (["true", "false"] if is_switch else [])

    def below(self, parent: str) -> dict[str, str]:
        """Return the names directly below a dotted key of the config, each with the kind of its value.

        Args:
            parent: Dotted key. "": the top level of the config.
        """
        # At the top level, the keys of train.yaml are returned without composing, which takes longer.
        if not parent:
            content = read_yaml(OWN_CONF / "train.yaml")
            kinds = {str(key): _kind(value) for key, value in content.items() if key not in ("defaults", "hydra")}
            return {**kinds, **dict.fromkeys((*NODES, *COLLECTIONS, PHASES), NODE)}
        found = self.compose_kinds(self.choices())
        start = f"{parent}."
        return {
            key.removeprefix(start): kind
            for key, kind in found.items()
            if key.startswith(start) and "." not in key.removeprefix(start)
        }

    def choices(self) -> list[str]:
        """Return the overrides that may add or remove keys of the config.

        They choose options of groups, begin with a sign, or set a `_target_`. Of swept options, the first is used.
        """
        groups = self.groups()
        keys = [(word, word.lstrip("+~").partition("=")[0]) for word in self.overrides]
        chosen = [word for word, key in keys if key in (*groups, "from_run") or word[0] in "+~" or "_target_" in key]
        return [SEVERAL.sub(r"\1", word) for word in chosen]  # of a sweep the first choice

    def compose_kinds(self, choices: Sequence[str]) -> dict[str, str]:
        """Compose the config with given overrides, and return the kind of each key's value by dotted key."""
        from exp.check.stages import compose
        from exp.config.copying import raw_values
        from exp.errors import ExpError

        try:
            config = compose(choices, config_dir=self.config_dir, config_name=self.config_name)
        except ExpError:  # the command reports the error when it is run
            default = self._replace(config_name="train")
            return default.compose_kinds(()) if choices or default != self else {}
        return {key: _kind(value) for key, value in leaves(raw_values(config)) if not key.startswith("_composition_")}


def _ends(kinds: dict[str, str], plus: str) -> list[str]:
    if plus == "~":
        return list(kinds)
    return [f"{name}." if kind == NODE else f"{name}=" for name, kind in kinds.items()]


def _kind(value: object) -> str:
    return NODE if isinstance(value, dict) and value else SWITCH if isinstance(value, bool) else VALUE
