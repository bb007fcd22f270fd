"""The command line of `python -m exp.train`: flags, help, and Hydra's answers to questions about the config."""

from __future__ import annotations

import argparse
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from exp.config.compose import composition_of, expanded
from exp.config.freeze import COMPOSITION
from exp.config.groups import PRIMARY, Vocabulary, open_search_path
from exp.config.habits import cure_of_flag
from exp.config.hydra_adapter import HYDRA_ERRORS, HYDRA_VERSION, answer, argument_parser, fault_of
from exp.config.overrides import SUBCOMMANDS, checked_lines, for_hydra, mended
from exp.config.reading import secrets_kept
from exp.config.slots import AXIS, MANY, ONE
from exp.errors import ConfigError, Fault

PROGRAM = "python -m exp.train"
HELP_WIDTH = 100
# That exp.data looks at in each part, unless it is told otherwise.
MOST_SAMPLES = 100_000
HELP = """\
{program} [flags] [overrides]

Trains a network that is described by YAML. Without overrides: a small network on 1797 images of digits.

  {program} model=mlp optimizer.lr=0.003           other options, other values
  {program} +precision=bf16 strategy=ddp           bfloat16 on two processes or all GPUs
  {program} 'hooks=[gradients,memory]'             what TensorBoard shows; quote brackets in zsh
  {program} -m optimizer.lr=1e-4,1e-3 seed=0,1     one job for each combination
  {program} from_run=outputs/train/DAY/TIME seed=1 the config of a run that is there, and what differs from it
  {program} --cfg job model=mlp                    print the config, run nothing
  python -m exp.check model=mlp                              say what is wrong with it, run nothing
  python -m exp.data data=wine                               look at its data: figures, leaks, pictures
  python -m exp.plan model=mlp                               what it takes: layers, memory of each rank, time of a step

Groups: = replaces, + adds.
{groups}

Keys at the top (--cfg job prints them all, with everything below):
{keys}

Flags:
  -m, --multirun            several jobs; a value may be a list a,b,c or range(0,5)
  --cfg job|hydra|all       print the config; --package optimizer prints a part, --resolve its values
  --info [defaults-tree]    where the config comes from: defaults-tree, defaults, searchpath, plugins, config, all
  --config-dir DIR          one more directory of configs, behind ./conf and before exp's own
  --config-name NAME        another primary config than train
  --samples N|all           of exp.data: how many samples of each part it looks at, 100,000 unless told otherwise
  --hydra-help  --version

exp completion bash|zsh prints what the tab key needs for all of this.
Your own options live in ./conf beside your modules; they win over exp's. Results land in outputs/.
"""


def parse_arguments(argv: Sequence[str], *, program: str = PROGRAM) -> argparse.Namespace:
    """Flags and overrides in any order.

    Raises: ConfigError on a flag that is unknown, wrongly used, or refused. SystemExit after --version.
    """
    from exp import __version__

    parser = argument_parser(program, version=f"exp {__version__}, Hydra {HYDRA_VERSION}")
    if program.endswith("exp.data"):
        parser.add_argument("--samples", type=_how_many, default=MOST_SAMPLES, help="of each part: a number, or all")
    flags = [option for action in parser._actions for option in action.option_strings]
    foreign = list(_foreign_flags(argv, flags))
    if foreign:
        commands = [
            _fault(word, f"{word!r} has no =", "key=value", SUBCOMMANDS[word])
            for word in argv[:1]
            if word in SUBCOMMANDS
        ]
        raise ConfigError([*commands, *_as_overrides(foreign, multirun=bool({"-m", "--multirun"} & set(argv)))])
    arguments = parser.parse_intermixed_args(list(argv))
    _read_mode(arguments)
    faults = list(_flag_faults(arguments))
    if faults:
        raise ConfigError(faults)
    if arguments.config_name is None:
        arguments.config_name = PRIMARY
    return arguments


def _foreign_flags(argv: Sequence[str], flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each flag that is none of ours, as argparse and LightningCLI have them, with its value: `--trainer.max_epochs 5`.

    flags: ours, which may be cut short.
    """
    words = iter(enumerate(argv))
    for index, word in words:
        flag, sign, value = word.partition("=")
        is_ours = any(own.startswith(flag) for own in flags) and flag != "--config"
        if not word.startswith("--") or word == "--" or is_ours:
            continue
        following = argv[index + 1] if index + 1 < len(argv) else "-"
        if not sign and not following.startswith("-") and "=" not in following:
            value = following
            next(words)
        yield flag, value if sign or value else "true"


def _as_overrides(foreign: Sequence[tuple[str, str]], *, multirun: bool) -> list[Fault]:
    """A fault for each flag that is none of ours, with the override that says the same here."""
    _, vocabulary = open_search_path(config_dir=None, config_name=PRIMARY)
    faults = []
    for flag, value in foreign:
        text = f"{flag.lstrip('-').rstrip('+').replace('-', '_')}={value}"
        cure = cure_of_flag(flag, value)
        if cure is None:
            _, wrong = checked_lines([text], vocabulary, multirun=multirun)
            cure = mended(text, wrong[0].cure, vocabulary) if wrong else f"Write {text}"
        faults.append(_fault(flag, "no flag of this command", "key=value, without dashes", cure))
    return faults


def _read_mode(arguments: argparse.Namespace) -> None:
    """Take `hydra.mode=MULTIRUN` for -m, and `hydra.mode=RUN` for what a command without it does."""
    for text in list(arguments.overrides):
        key, _, word = text.lstrip("+").partition("=")
        if key == "hydra.mode" and word.lower() in ("run", "multirun"):
            arguments.overrides.remove(text)
            is_sweep = word.lower() == "multirun"
            arguments.multirun, arguments.run = arguments.multirun or is_sweep, arguments.run or not is_sweep


def _how_many(text: str) -> int | None:
    """A number of samples; None for all of them."""
    if text == "all":
        return None
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of samples, 1 or more, and not all")
    return int(text)


def is_question(arguments: argparse.Namespace) -> bool:
    """Whether the command asks about the config and runs nothing."""
    asked = arguments.help or arguments.hydra_help
    return bool(asked or arguments.cfg is not None or arguments.info is not None)


@secrets_kept()
def answer_question(arguments: argparse.Namespace) -> None:
    """Prints the help, or what Hydra answers. Imports neither torch nor lightning.

    Raises: ConfigError where the overrides have faults.
    """
    loader, vocabulary = open_search_path(
        config_dir=arguments.config_dir, config_name=arguments.config_name, overrides=arguments.overrides
    )
    if arguments.help:
        print(help_text(vocabulary))
        return
    overrides = list(arguments.overrides)
    if arguments.cfg is not None or arguments.info is not None:
        overrides = list(expanded(overrides, config_dir=arguments.config_dir, config_name=arguments.config_name))
        lines, faults = checked_lines(overrides, vocabulary, multirun=False)
        if faults:
            raise ConfigError(faults)
        overrides = for_hydra(lines, vocabulary)
    try:
        answer(loader, arguments, config_name=arguments.config_name, overrides=overrides)
    except BrokenPipeError:
        raise
    except HYDRA_ERRORS as error:
        if arguments.cfg is not None or arguments.info is not None:
            where = {"config_dir": arguments.config_dir, "config_name": arguments.config_name}
            composition_of(arguments.overrides, **where)
        raise ConfigError([fault_of(error)]) from error
    except SystemExit as error:
        # Hydra leaves with 1 after its own message on a package that is not there; for a wrong command that is 2.
        raise SystemExit(2 if error.code else 0) from error


def help_text(vocabulary: Vocabulary) -> str:
    """The page of --help: how to call it, what can be chosen here, the flags."""
    rows = []
    for title, groups in (("one of", ONE), ("any of", MANY), ("none or one of", AXIS)):
        for group in groups:
            options = vocabulary.options(group) if group in vocabulary.groups else []
            if options:
                rows += _row(group, title, options)
    extra = [group for group in (*vocabulary.groups, *vocabulary.own) if group not in (*ONE, *MANY, *AXIS)]
    rows += [line for group in extra for line in _row(group, "one of", vocabulary.options(group))]
    keys = ", ".join(key for key in vocabulary.keys if key not in vocabulary.groups)
    keys = textwrap.fill(keys, width=HELP_WIDTH, initial_indent="  ", subsequent_indent="  ")
    return HELP.format(program=PROGRAM, groups="\n".join(rows), keys=keys).rstrip()


def _row(group: str, title: str, options: Sequence[str]) -> list[str]:
    head = f"  {group:<11} {title:<15} "
    return textwrap.wrap(", ".join(options), width=HELP_WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def _flag_faults(arguments: argparse.Namespace) -> list[Fault]:
    faults = []
    if arguments.experimental_rerun is not None:
        got, run = "it unpickles a file, which may run any code", Path(arguments.experimental_rerun).parent
        faults.append(_fault("--experimental-rerun", got, "the config of a run as text", f"Write from_run={run}"))
    if arguments.config_path is not None:
        cure = f"Write --config-dir {arguments.config_path}"
        faults.append(_fault("--config-path", "exp's own configs stay where they are", "one more directory", cure))
    if arguments.package is not None and arguments.cfg is None:
        cure = f"Write --cfg job --package {arguments.package}"
        faults.append(_fault("--package", "without --cfg", "the part of a config to print", cure))
    if arguments.shell_completion:
        shell = next((shell for shell in ("zsh", "bash") if any(shell in text for text in arguments.overrides)), "bash")
        fault = _fault("--shell-completion", "Hydra's completion, which knows no key and no list", "exp's own")
        faults.append(replace(fault, cure=f'Write eval "$(python -m exp completion {shell})"'))
    modes = {
        "--run": arguments.run, "--multirun": arguments.multirun, "--cfg": arguments.cfg is not None,
        "--info": arguments.info is not None,
    }  # fmt: skip
    used = [flag for flag, is_used in modes.items() if is_used]
    if len(used) > 1:
        faults.append(_fault(" ".join(used), "flags that exclude each other", "one of them"))
    if arguments.resolve and arguments.cfg is None:
        faults.append(
            _fault("--resolve", "without --cfg", "the values of a config to print", "Write --cfg job --resolve")
        )
    return faults


def _fault(key: str, got: str, expected: str, cure: str | None = None) -> Fault:
    return Fault(key=key, got=got, expected=expected, cure=cure, source="command line")


@secrets_kept()
def print_tree(config: DictConfig) -> None:
    """Prints a branch for each node at the top, its values resolved."""
    from rich.console import Console
    from rich.syntax import Syntax
    from rich.tree import Tree

    tree = Tree("config", guide_style="dim")
    for key in config:
        if key == COMPOSITION:
            continue
        if OmegaConf.is_config(config[key]):
            text = OmegaConf.to_yaml(config[key], resolve=True).rstrip() or "{}"
            tree.add(str(key)).add(Syntax(text, "yaml", background_color="default"))
        else:
            tree.add(f"{key!s}: {config[key]}")
    Console(highlight=False).print(tree)


def with_values(overrides: Sequence[str], values: Mapping[str, str]) -> str:
    """Return the command that trains with other values.

    values: texts by dotted key; keys that the config does not have begin with a +.
    """
    keys = {*map(key_of, values), "hydra.run.dir"}
    typed = [text for text in overrides if key_of(text) not in keys]
    return shlex.join(["python", "-m", "exp.train", *typed, *(f"{key}={value}" for key, value in values.items())])


def key_of(override: str) -> str:
    """Return the key of an override."""
    return override.lstrip("+~").partition("=")[0]
