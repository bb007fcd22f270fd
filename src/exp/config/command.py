"""The command line of `python -m exp.train`: flags, help, and Hydra's answers to questions about the config."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from exp.config.compose import composition_of, expanded
from exp.config.freeze import COMPOSITION
from exp.config.group_kinds import AXIS, MANY, ONE
from exp.config.groups import PRIMARY, Vocabulary, open_search_path
from exp.config.hydra_adapter import HYDRA_ERRORS, HYDRA_VERSION, answer, argument_parser, fault_of
from exp.config.overrides import checked_lines, for_hydra
from exp.config.reading import secrets_kept
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
    if program.endswith("exp.check"):
        parser.add_argument("--all", action="store_true", help="all faults at once, those that need torch, too")
    if program.endswith("exp.data"):
        parser.add_argument("--samples", type=_how_many, default=MOST_SAMPLES, help="of each part: a number, or all")
    arguments = parser.parse_intermixed_args(list(argv))
    faults = list(_flag_faults(arguments))
    if faults:
        raise ConfigError(faults)
    if arguments.config_name is None:
        arguments.config_name = PRIMARY
    return arguments


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
    extra = [group for group in vocabulary.groups if group not in (*ONE, *MANY, *AXIS)]
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
        faults.append(_fault("--experimental-rerun", "it unpickles a file, which may run any code", "resume=PATH"))
    if arguments.config_path is not None:
        faults.append(_fault("--config-path", "the place of exp's own configs is fixed", "--config-dir DIR, or ./conf"))
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
        faults.append(_fault("--resolve", "without --cfg", "--cfg job --resolve"))
    return faults


def _fault(key: str, got: str, expected: str) -> Fault:
    return Fault(key=key, got=got, expected=expected, source="command line")


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
