"""The file .env of the working directory: variables for the configs, and for nothing else.

A folder from elsewhere may bring one. So it sets what is exp's own, EXP_*, and what a config reads by `oc.env`; a name
that steers processes, such as LD_PRELOAD or GIT_DIR, is refused even where a config reads it.
"""

from __future__ import annotations

import functools
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

from exp.errors import ConfigError, Fault
from exp.redaction import is_secret

if TYPE_CHECKING:
    from dotenv.parser import Binding

OWN_PREFIX = "EXP_"
# Of the interpreter, the loader, shells, git, compilers, libraries that load plug-ins or talk to other machines, and
# of launchers; some of exp's own go from a run to its ranks.
STEERING = re.compile(
    r"(LD|DYLD|GIT|SSH|BASH|NODE|JAVA|JDK|GCONV|GLIBC|MALLOC|XDG|DBUS|CUDA|CUDNN|NVIDIA|NCCL|GLOO|UCX|"
    r"OMPI|OPAL|PMIX?|MPI|PYTORCH|TRITON|ATEN|MKL|KMP|OMP|ONEDNN|DNNL|OPENBLAS|NUMBA|"
    r"XLA|JAX|TF|SLURM|SBATCH|SRUN|PL|LIGHTNING|HYDRA|DS|DEEPSPEED|PIP|UV|CONDA|CMAKE|NINJA|OPENSSL|CURL|REQUESTS|"
    r"KRB5|AWS_CA|MLFLOW)(_.*)?"
    r"|PYTHON.*|PERL.*|RUBY.*|TORCH.*|.*OPTS?|.*OPTIONS|LC_.*|LANG|LANGUAGE|LOCPATH|NLSPATH|PATH|HOME|USER|SHELL|ENV|IFS|PS4|PROMPT_COMMAND|CDPATH|TERM"
    r"|TERMINFO|TMPDIR|TEMP|TMP|EDITOR|VISUAL|PAGER|BROWSER|LESS.*|DISPLAY|CC|CXX|CPP|AR|.*FLAGS|VIRTUAL_ENV|SSL.*"
    r"|RANK|NODE_RANK|GROUP_.*|ROLE_.*|LOCAL_RANK|LOCAL_WORLD_SIZE|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|.*_PROXY"
    r"|.*PRELOAD.*|WANDB_+(?!API_KEY$).*",
    re.IGNORECASE,
)
# By these exp's launcher talks with its ranks.
OF_RANKS = ("EXP_PARENT", "EXP_EXCHANGE", "EXP_STORE", "EXP_SUPERVISED", "EXP_IMPORT_PATH")
READ = re.compile(r"oc\.env\s*:\s*[\"']?([A-Za-z_][A-Za-z0-9_]*)")
REFERENCE = re.compile(r"\$\{([^}:]+)")
MAX_BYTES = 100_000
# Of configs that are searched for the names that they read.
MAX_FILES = 2_000


def load_env_file(configs: Iterable[Path], *, overrides: Sequence[str] = ()) -> None:
    """Set the variables of ./.env that are not set yet. Without python-dotenv it says how to install it.

    configs: files, or folders of YAML files, that may read variables; overrides: of the command line, which may, too.
    Raises: ConfigError with every line that is refused.
    """
    path = Path.cwd() / ".env"
    if path.is_file():
        _load(path, path.stat().st_mtime_ns, tuple(configs), frozenset(names_read((), overrides)))


# Once for each version of the file: a sweep composes many jobs, and none may bring back what a job unset.
@functools.cache
def _load(path: Path, _changed: int, configs: tuple[Path, ...], typed: frozenset[str]) -> None:
    try:
        values, faults = read_env_file(path, configs=configs, typed=typed)
    except ImportError:
        print("exp: .env is not read, python-dotenv is missing: pip install 'exp-framework[env]'", file=sys.stderr)
        return
    if faults:
        raise ConfigError(faults)
    for name, value in values.items():
        if name not in os.environ and value is not None:
            os.environ[name] = value


def read_env_file(
    path: Path, *, configs: Sequence[Path], typed: Set[str] = frozenset()
) -> tuple[dict[str, str | None], list[Fault]]:
    """The variables of a .env, of which none is set, and its faults; see load_env_file.

    typed: the variables that the command line reads.
    Raises: ImportError without python-dotenv; ConfigError where the file is no text.
    """
    from dotenv import dotenv_values
    from dotenv.parser import parse_stream

    text = _text(path)
    faults = list(_faults(parse_stream(io.StringIO(text)), configs, typed))
    return dotenv_values(stream=io.StringIO(text)), faults


def _text(path: Path) -> str:
    """UTF-8, with or without a byte order mark, with the line ends of any system."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError([_fault(".env", None, f"it cannot be read: {error.strerror}", "a readable file")]) from error
    if len(content) > MAX_BYTES:
        raise ConfigError([_fault(".env", None, f"{len(content)} bytes", f"at most {MAX_BYTES}")])
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        got = f"a byte that is not UTF-8, {content[error.start : error.start + 1]!r}"
        raise ConfigError([_fault(".env", line, got, "text in UTF-8", "Save the file as UTF-8")]) from error


def _faults(bindings: Iterable[Binding], configs: Sequence[Path], typed: Set[str]) -> Iterator[Fault]:
    read: Set[str] | None = None
    for binding in bindings:
        name, value, lines = binding.key, binding.value, binding.original
        # What stands before it, empty lines and comments, belongs to a binding, too.
        line = lines.line + len(lines.string) - len(lines.string.lstrip("\n"))
        if binding.error or (name is not None and value is None):
            yield _fault(".env", line, f"{lines.string.strip()[:60]!r}", "NAME=VALUE")
        elif name is None or value is None:
            continue
        elif name in OF_RANKS if name.startswith(OWN_PREFIX) else STEERING.fullmatch(name):
            cure = f"If you want it, write {name}=... before the command"
            yield _fault(name, line, "a variable that steers processes", "variables for the configs", cure)
        elif "\0" in value or "\0" in name or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield _fault(name, line, "not a variable's name and text", "letters, digits and _ in the name")
        elif not is_secret(name) and any(map(is_secret, REFERENCE.findall(value))):
            yield _fault(name, line, "a secret under a name that does not say so", "a name such as EXP_..._TOKEN")
        elif not name.startswith(OWN_PREFIX):
            read = typed | names_read(configs) if read is None else read
            if name not in read:
                cure = f"Let a config read it, as ${{oc.env:{name}}}, or write {name}=... before the command"
                yield _fault(name, line, "a variable that no config reads", f"{OWN_PREFIX}*, or one that is read", cure)


def names_read(configs: Iterable[Path], overrides: Iterable[str] = ()) -> set[str]:
    """The variables that configs read by `oc.env`, by their text."""
    found = {name for text in overrides for name in READ.findall(text)}
    for config in configs:
        files = [config] if config.is_file() else sorted(config.rglob("*.yaml"))[:MAX_FILES] if config.is_dir() else []
        for file in files:
            found |= set(READ.findall(file.read_text(encoding="utf-8", errors="replace")))
    return found


def _fault(key: str, line: int | None, got: str, expected: str, cure: str | None = None) -> Fault:
    source = ".env" if line is None else f".env, line {line}"
    return Fault(key=key, got=got, expected=expected, cure=cure, source=source)
