"""The command line of `python -m exp.train`: its flags, its help text, and the flag --cfg, which prints the config."""

from __future__ import annotations

import argparse
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.compose import composition_of
from exp.config.found_run import key_of
from exp.config.groups import PRIMARY, Vocabulary, open_search_path
from exp.config.hydra_adapter import HYDRA_VERSION, hydra_config
from exp.config.overrides import as_override, checked_lines
from exp.config.reading import secrets_kept
from exp.config.slots import AXIS, MANY, ONE
from exp.errors import COMMAND_LINE, ConfigError, ErrorDetails, command_line_error, raise_errors, unknown_word
from exp.spelling import fix_of_flag, fix_of_subcommand

PROGRAM = "python -m exp.train"
HELP_WIDTH = 110
TITLES = (("one of", ONE), ("any of", MANY), ("none or one of", AXIS))
FLAGS = (
    "--help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--config-name", "--config-dir",
    "--samples",
)  # fmt: skip
# The default of --samples: the number of samples that exp.data reads from each split.
MOST_SAMPLES = 100_000
HELP = """\
{program} [flags] [overrides]

Train a network described by YAML. The default is a small network on 1,797 images of digits.

  {program} model=mlp optimizer.lr=0.003         other options and values
  {program} +precision=bf16 strategy=ddp         bfloat16 on two processes or all GPUs
  {program} 'hooks=[gradients,memory]'           the contents of TensorBoard
  {program} -m optimizer.lr=1e-4,1e-3 seed=0,1   a sweep: one job for each combination
  {program} from_run=outputs/train/DAY/TIME seed=1   the config of an earlier run, with changes
  python -m exp.check model=mlp                            report all errors of a config
  python -m exp.plan model=mlp                             layers, memory and time before a run

= replaces an option, + adds one. Quote square brackets in zsh.
{groups}
{program} -h GROUP lists the options of another group:
{others}
{program} --cfg job prints all keys.

Flags:
  -m, --multirun          a sweep; a value may be a list a,b,c or range(0,5)
  --cfg job|hydra|all     print the config; --package KEY prints a part, --resolve its values
  --config-dir DIR        a directory of configs between ./conf and exp's own
  --config-name NAME      a primary config other than train
  --samples N|all         of exp.data: samples to read of each split, 100,000 by default
  --version               the versions of exp and Hydra

Your own options are in ./conf and override exp's. Results are in outputs/.
"""
# The most important groups. The help lists the options of these groups first.
FIRST_GROUPS = ("model", "data", "precision", "strategy", "hooks")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([command_line_error(COMMAND_LINE, message, "the flags of --help, and key=value")])


def _parser(program: str) -> _Parser:
    from exp import __version__

    parser = _Parser(prog=program, add_help=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="version", version=f"exp {__version__}, Hydra {HYDRA_VERSION}")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--run", "-r", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-name", "-cn", default=PRIMARY)
    parser.add_argument("--config-dir", "-cd")
    if program.endswith("exp.data"):
        parser.add_argument("--samples", type=_read_samples, default=MOST_SAMPLES)
    return parser


def parse_arguments(argv: Sequence[str], *, program: str = PROGRAM) -> argparse.Namespace:
    """Parse the flags and overrides of a command, which may be in any order.

    Args:
        argv: Arguments, without the program.
        program: Name of the command, for messages. Default: PROGRAM.

    Raises:
        ConfigError: A flag is unknown or wrongly used.
        SystemExit: The flag is --version.
    """
    foreign = list(_foreign_flags(argv, FLAGS))
    if foreign:
        fix = fix_of_subcommand(argv[0])
        commands = [command_line_error(argv[0], f"{argv[0]!r} has no =", "key=value", fix)] if fix else []
        raise ConfigError([*commands, *_as_overrides(foreign, multirun=bool({"-m", "--multirun"} & set(argv)))])
    arguments = _parser(program).parse_intermixed_args(list(argv))
    raise_errors(_flag_errors(arguments))
    return arguments


def _foreign_flags(argv: Sequence[str], flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each unknown flag and its value, such as `--trainer.max_epochs` and `5` for LightningCLI's flags.

    Args:
        argv: Arguments, without the program.
        flags: Known flags. Users may abbreviate them.
    """
    words = iter(enumerate(argv))
    for index, word in words:
        flag, sign, value = word.partition("=")
        is_known = any(own.startswith(flag) for own in flags) and flag != "--config"
        if not word.startswith("--") or word == "--" or is_known:
            continue
        following = argv[index + 1] if index + 1 < len(argv) else "-"
        if not sign and not following.startswith("-") and "=" not in following:
            value = following
            next(words)
        yield flag, value if sign or value else "true"


def _as_overrides(foreign: Sequence[tuple[str, str]], *, multirun: bool) -> list[ErrorDetails]:
    """Return an error for each unknown flag. The fix in the error is an equivalent override.

    Args:
        foreign: Unknown flags and their values.
        multirun: Whether the command is a sweep (-m).
    """
    vocabulary = open_search_path(config_dir=None, config_name=PRIMARY)
    errors = []
    for flag, value in foreign:
        text = f"{flag.lstrip('-').rstrip('+').replace('-', '_')}={value}"
        fix = fix_of_flag(flag, value)
        if fix is None:
            _, wrong = checked_lines([text], vocabulary, multirun=multirun)
            fix = as_override(text, wrong[0].fix, vocabulary) if wrong else f"Write {text}"
        errors.append(command_line_error(flag, "not a flag of this command", "key=value, without dashes", fix))
    return errors


def _read_samples(text: str) -> int | None:
    """Return the value of --samples. Return None for `all`."""
    if text == "all":
        return None
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of samples, 1 or more, or all")
    return int(text)


@secrets_kept()
def answer_question(arguments: argparse.Namespace) -> bool:
    """Print the help for --help, or the config for --cfg.

    Neither torch nor lightning is imported, because these imports are slow.

    Args:
        arguments: Parsed arguments of the command.

    Returns:
        Whether the help or the config was printed. In this case, the command must not run anything.

    Raises:
        ConfigError: The overrides have errors.
    """
    where = {"config_dir": arguments.config_dir, "config_name": arguments.config_name}
    if arguments.help:
        groups = [word for word in arguments.overrides if "=" not in word]
        print(help_text(open_search_path(**where), groups))
    elif arguments.cfg is not None:
        config = composition_of(arguments.overrides, **where).config
        with hydra_config(config):
            print(_config_text(config, arguments), end="")
    return bool(arguments.help or arguments.cfg is not None)


def _config_text(config: DictConfig, arguments: argparse.Namespace) -> str:
    """Return a part of a config as YAML. The flags --cfg and --package select the part.

    Raises:
        ConfigError: --package is not a node of the config, or a value cannot be resolved.
    """
    names = [str(name) for name in config if arguments.cfg == "all" or (name == "hydra") == (arguments.cfg == "hydra")]
    try:
        if arguments.package is None:
            part = OmegaConf.masked_copy(config, names)
        else:
            part = OmegaConf.select(config, arguments.package, throw_on_missing=True)
        if not OmegaConf.is_config(part):
            raise ConfigError([command_line_error("--package", str(arguments.package), "a node of the config")])
        if arguments.resolve:
            OmegaConf.resolve(part)
        text = OmegaConf.to_yaml(part)
    except OmegaConfBaseException as error:
        detail = command_line_error("--cfg", str(error).splitlines()[0], "a config with valid interpolations")
        raise ConfigError([detail]) from error
    return text if arguments.package is None else f"# @package {arguments.package}\n{text}"


def help_text(vocabulary: Vocabulary, groups: Sequence[str] = ()) -> str:
    """Return the text of --help.

    Args:
        vocabulary: Groups and options of the search path.
        groups: Config groups. If some are given, the text lists only the options of these groups. Default: none.

    Raises:
        ConfigError: A name in `groups` is not a config group.
    """
    titles = dict.fromkeys((*vocabulary.groups, *vocabulary.own), "one of")
    titles |= {group: title for title, of in TITLES for group in of if group in titles}
    unknown = [name for name in groups if name not in titles]
    if unknown:
        raise ConfigError([unknown_word("--help", name, titles, source=COMMAND_LINE) for name in unknown])
    shown = groups or FIRST_GROUPS
    rows = [line for name in shown for line in _row(name, titles[name], vocabulary.options(name))]
    if groups:
        return "\n".join(rows)
    others = _wrap([name for name in titles if name not in shown and vocabulary.options(name)], indent="  ")
    return HELP.format(program=PROGRAM, groups="\n".join(rows), others="\n".join(others)).rstrip()


def _wrap(words: Sequence[str], *, indent: str) -> list[str]:
    return textwrap.wrap(", ".join(words), width=HELP_WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent))


def _row(group: str, title: str, options: Sequence[str]) -> list[str]:
    return _wrap(options, indent=f"  {group:<11} {title:<15} ")


def _flag_errors(arguments: argparse.Namespace) -> Iterator[ErrorDetails]:
    if arguments.package is not None and arguments.cfg is None:
        fix = f"Write --cfg job --package {arguments.package}"
        yield command_line_error(
            "--package", "without --cfg", "--cfg job, because --package selects a part of its output", fix
        )
    if arguments.resolve and arguments.cfg is None:
        fix = "Write --cfg job --resolve"
        yield command_line_error(
            "--resolve", "without --cfg", "--cfg job, because --resolve replaces ${...} in its output", fix
        )
    modes = {"--run": arguments.run, "--multirun": arguments.multirun, "--cfg": arguments.cfg is not None}
    used = [flag for flag, is_used in modes.items() if is_used]
    if len(used) > 1:
        yield command_line_error(" ".join(used), "flags that exclude each other", "one of them")


def with_values(overrides: Sequence[str], values: Mapping[str, str]) -> str:
    """Return a command of exp.train with given overrides and new values.

    Args:
        overrides: Overrides. The command leaves out those that set hydra.run.dir or keys in `values`.
        values: Texts of the new values by dotted key. If the config lacks the key, the key begins with a +.
    """
    keys = {*map(key_of, values), "hydra.run.dir"}
    typed = [text for text in overrides if key_of(text) not in keys]
    return shlex.join(["python", "-m", "exp.train", *typed, *(f"{key}={value}" for key, value in values.items())])
