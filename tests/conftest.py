"""Fixtures of all tests: fast and slow suite, networks of conf/model, real ranks, and commands in forked processes."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import re
import runpy
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import exp
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.config.freeze import freeze
from exp.construct import construct
from exp.models.inference import example_inputs, materialise
from exp.shared_types import DataSpec
from exp.sweeps.job import MODULES

# Garbage collection skips the imported modules, which saves an eighth of the suite's time.
gc.freeze()
gc.set_threshold(50_000, 20, 20)

# Shells start background jobs with these signals ignored, and so does nohup. Child processes would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An absolute path, because tests change the working directory.
EXTRAS = Path(exp.__file__).resolve().parent / "extras"
# Users may remove these folders. A test with another name of a folder fails, because the name is a mistake.
EXTRAS_NAMES = frozenset({
    "audit", "clusters", "dashboard", "debugging", "deepspeed", "doctor", "evaluation", "export", "finders", "gallery",
    "hf", "mlflow", "report", "research", "schema", "serve", "survey", "tokenizers", "wandb",
})  # fmt: skip
RANK_PROGRAM = Path(__file__).parent / "rank_program.py"
COMMAND_PROGRAM = Path(__file__).parent / "command_program.py"
# Same value as in .ci/run: a process with OpenBLAS threads cannot fork, and two threads change the order of sums.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch, imported above, does not read the variable again.
torch.set_num_threads(1)
# Two fork servers with the imports of a run save 3 s per process. RANKS also has the imports of several ranks, such
# as torch's compiler, which must not be loaded in a run of one process. Sweeps in this process use the server of the
# standard library, which they start with blocked signals.
OF_A_RUN = [
    *MODULES,
    *("exp.cli.train", "exp.cli.worker", "exp.cli.command_line", "exp.strategies.single", "hydra_plugins.exp.launcher"),
    *("torch.profiler._cupti_monitor", "torch.utils.serialization.config"),
    *("PIL.BmpImagePlugin", "PIL.GifImagePlugin", "PIL.JpegImagePlugin", "PIL.PpmImagePlugin"),
]
OF_RANKS = [
    *("exp.strategies.fsdp", "exp.strategies.hybrid", "exp.strategies.pipeline", "exp.strategies.tensor_parallel"),
    *("exp.engine.pipelined_module", "torch._dynamo", "torch._dynamo.convert_frame", "torch.distributed.fsdp"),
    *("torch.distributed.pipelining", "torch.distributed.tensor.parallel", "torch.nn.parallel.distributed"),
]
RUNS, RANKS = forkserver.ForkServer(), forkserver.ForkServer()
RUNS.set_forkserver_preload(OF_A_RUN)
RANKS.set_forkserver_preload([*OF_A_RUN, *OF_RANKS])
CONF = Path(__file__).parents[1] / "conf" / "model"
DIGITS = DataSpec(input_shape=(1, 8, 8), input_dtype="float32", num_classes=10, num_outputs=10)


EXAMPLES = 25
ALL_EXAMPLES = 1000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        type=float,
        default=0.1,
        help="the share of the cases that each exhaustive test runs, above 0 and at most 1; default: 0.1",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Distribute neighboring tests to the same process, which then creates the fixtures of a file once."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"
    if is_slow_suite(config) and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))  # for all workers


def pytest_configure(config: pytest.Config) -> None:
    if not is_gpu_suite(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    examples = round(ALL_EXAMPLES * config.option.share)
    slow = is_slow_suite(config)
    # The time of an example depends on the load of the machine.
    fixtures, slowness = hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow
    hypothesis.settings.register_profile(
        "exp",
        deadline=None,
        suppress_health_check=[fixtures, slowness],
        database=None,
        print_blob=True,
        derandomize=not slow,
        max_examples=max(1, examples) if slow else EXAMPLES,
    )
    hypothesis.settings.load_profile("exp")


def pytest_report_header(config: pytest.Config) -> str | None:
    if not is_slow_suite(config):
        return None
    return f"random cases: --hypothesis-seed={config.option.hypothesis_seed} --share={config.option.share} repeats them"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the markers ranks and process by fixture, and give Hypothesis new examples in the slow suite."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "ranks" in fixtures:
            item.add_marker("ranks")
        if "commands" in fixtures or "scripts" in fixtures:
            item.add_marker("process")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU and pytest -m gpu"))
        if is_slow_suite(config) and hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that needs a removed folder of src/exp/extras."""
    try:
        yield
    except Exception as error:
        if removed := removed_extras(f"{error!r} {getattr(error, 'errors', '')}"):
            pytest.skip(f"needs src/exp/extras/{removed[0]}, which was removed")
        raise


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip test files that import a removed folder of src/exp/extras."""
    return True if collection_path.suffix == ".py" and removed_extras(collection_path.read_text()) else None


def removed_extras(text: str) -> list[str]:
    """Return the removed folders of src/exp/extras that a text mentions."""
    names = EXTRAS_NAMES.intersection(re.findall(r"\bexp\.extras\.([a-z]+)", text))
    return sorted(name for name in names if not (EXTRAS / name / "__init__.py").is_file())


def is_slow_suite(config: pytest.Config) -> bool:
    return "slow" in config.option.markexpr and "not slow" not in config.option.markexpr


def is_gpu_suite(config: pytest.Config) -> bool:
    return "gpu" in config.option.markexpr and "not gpu" not in config.option.markexpr


@dataclass(frozen=True, kw_only=True)
class Share:
    """Fraction `part` (above 0, at most 1) of an exhaustive test that the slow suite runs."""

    part: float
    seed: int

    def count(self, most: int) -> int:
        """Return the number of repetitions out of `most`, at least one."""
        return max(1, round(self.part * most))

    def of(self, cases: Sequence[Any]) -> list[Any]:
        """Return evenly spaced cases, at least one; the seed selects the first."""
        step = max(1, round(1 / self.part))
        return list(cases[self.seed % min(step, len(cases)) :: step])

    def random(self) -> random.Random:
        """Return a random generator with the seed."""
        return random.Random(self.seed)


@pytest.fixture(scope="session")
def share(request: pytest.FixtureRequest) -> Share:
    """The share and the seed of `--share` and `--hypothesis-seed`."""
    return Share(part=request.config.option.share, seed=int(request.config.option.hypothesis_seed or 0))


@pytest.fixture
def without_waiting() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context manager in which a CUDA operation that waits for the device raises an error."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    return context


# Script that pip writes for an entry of [project.scripts].
SCRIPT = """#!{python}
import re
import sys
from {module} import {function}
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit({function}())
"""


@pytest.fixture(scope="session")
def scripts(tmp_path_factory) -> Path:
    """A folder with the scripts of an installation and their Python."""
    folder: Path = tmp_path_factory.mktemp("bin")
    named = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["scripts"]
    texts = {name: SCRIPT.format(python=sys.executable, module=module, function=function)
             for name, (module, function) in ((name, target.split(":")) for name, target in named.items())}  # fmt: skip
    for name, text in {**texts, "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n'}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def forked(program: Path, settings: Mapping[str, object], *, of_ranks: bool) -> BaseProcess:
    """Fork a process from the server RUNS or RANKS, which runs a program with the global SETTINGS."""
    # The target must be importable in the other process, and modules of the tests are not.
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=runpy.run_path, args=(str(program), {"SETTINGS": dict(settings)}, "__main__"))
    with pytest.MonkeyPatch.context() as patched:
        # multiprocessing connects to its server with this function
        patched.setattr(forkserver, "connect_to_new_process", (RANKS if of_ranks else RUNS).connect_to_new_process)
        process.start()
    return process


@pytest.fixture(scope="session")
def fork() -> Callable[..., BaseProcess]:
    """The function `forked`, for the conftest.py files in the folders."""
    return forked


def build(name: str, *overrides: str, spec: DataSpec = DIGITS, device: str = "cpu") -> nn.Module:
    """Return the network of conf/model/<name>.yaml with overrides, for data with the given spec."""
    data = {
        "input_shape": list(spec.input_shape),
        "input_dtype": spec.input_dtype,
        "num_classes": spec.num_classes,
        "num_outputs": spec.num_outputs,
    }
    config = OmegaConf.create({"model": _option(name), "data": data})
    config.merge_with_dotlist(list(overrides))
    with torch.device(device):
        network = construct(OmegaConf.to_container(config, resolve=True)["model"], key="model", allow=())
        materialise(network, example_inputs(spec, device=device))
    return network


def _option(name: str) -> Any:
    """Return conf/model/<name>.yaml merged with the options of its defaults list."""
    node = OmegaConf.load(CONF / f"{name}.yaml")
    defaults = node.pop("defaults", ["_self_"])
    return OmegaConf.merge(*(node if one == "_self_" else _option(one) for one in defaults))


@pytest.fixture
def build_model():
    return build


@pytest.fixture
def text(tmp_path: Path) -> tuple[str, ...]:
    """Overrides that select a generated text, because the default of data=text differs between versions of Python."""
    draws = np.random.RandomState(0)  # RandomState draws the same numbers in every version of NumPy
    words = ["".join(draws.choice([*"abcdefghijklmnopqrstuvwxyz"], size=length)) for length in draws.randint(1, 9, 400)]
    path = tmp_path / "text.txt"
    path.write_text(" ".join(draws.choice(words, size=10_000)), encoding="utf-8")
    return ("data=text", f"data.dataset.files={path}")


class Ranks:
    """Starts gloo ranks as forks of a process with all imports, which takes about 0.3 s per rank.

    `train` runs a config as exp.worker does. `call` runs a function of the test's file in a joined process group.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._count = 0

    def freeze(self, *overrides: str) -> Path:
        """Check and freeze a config, and return its run directory."""
        self._count += 1
        directory = self.place / f"run{self._count}"
        config = exp.compose([f"hydra.run.dir={directory}", "trainer.enable_progress_bar=false", *overrides])
        return freeze(plan(resolve(config)).resolved.config)

    def train(self, *overrides: str, ranks: int = 1, seconds: float = 300) -> Trained:
        """Freeze a config and run it in `ranks` processes, for at most `seconds`."""
        directory = self.freeze(*overrides)
        found = self._run(ranks, seconds, directory=str(directory))
        return Trained(directory=directory, **found[0])

    def call(
        self, function: Callable[..., Any], *, ranks: int = 2, seconds: float = 300, **arguments: Any
    ) -> list[Any]:
        """Call function(rank, **arguments) in every rank, and return the pickled results in the order of ranks."""
        file = function.__code__.co_filename
        return self._run(ranks, seconds, file=file, name=function.__name__, arguments=arguments)

    def _run(self, ranks: int, seconds: float, **settings: Any) -> list[Any]:
        self._count += 1
        exchange = self.place / f"exchange{self._count}"
        exchange.mkdir()
        started = []
        for rank in range(ranks):
            given = {
                "rank": rank,
                "world_size": ranks,
                "store": str(exchange / "store") if ranks > 1 else None,
                "result": str(exchange / f"result{rank}"),
                **settings,
            }
            started.append(forked(RANK_PROGRAM, given, of_ranks=ranks > 1))
        try:
            ends = time.monotonic() + seconds
            for process in started:
                process.join(max(0.0, ends - time.monotonic()))
            errors = [path.read_text() for path in sorted(exchange.glob("*.error"))]
            assert not errors, "\n".join(errors)
            assert [process.exitcode for process in started] == [0] * ranks, "a rank did not end"
        finally:
            for process in started:
                if process.is_alive():
                    process.kill()
                process.join()
        return [pickle.loads((exchange / f"result{rank}").read_bytes()) for rank in range(ranks)]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Results of `Ranks.train`, with the float64 values that rank 0 logged by tag and step."""

    directory: Path
    values: dict[str, dict[int, float]]
    report: dict[str, Any]

    @property
    def losses(self) -> list[float]:
        """Return the training loss of each step."""
        return [value for _, value in sorted(self.values["loss/train"].items())]

    def checkpoint(self, name: str = "last") -> dict[str, Any]:
        return torch.load(self.directory / "checkpoints" / f"{name}.ckpt", weights_only=True)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.chdir(tmp_path)
    return Ranks(tmp_path)


class Commands:
    """Runs commands such as `python -m exp.train` in forked processes.

    The ranks of a command are forked from it, and the jobs of a sweep from the server of this process. With
    fresh_ranks=True, ranks are new interpreters and jobs have a new server, as outside the tests.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._count = 0
        self._started: list[BaseProcess] = []

    def run(
        self,
        *arguments: str,
        module: str = "exp.train",
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        fresh_ranks: bool = False,
        seconds: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; `environment` has variables in addition to those of this process."""
        started = self.start(*arguments, module=module, cwd=cwd, environment=environment, fresh_ranks=fresh_ranks)
        return started.end(seconds=seconds)

    def start(
        self,
        *arguments: str,
        module: str = "exp.train",
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        fresh_ranks: bool = False,
        output: Path | None = None,
        error: Path | None = None,
    ) -> Command:
        """Start a command. output, error: files such as /dev/full, instead of those that Command.end reads."""
        self._count += 1
        streams = output or self.place / f".stdout{self._count}", error or self.place / f".stderr{self._count}"
        settings = {
            "module": module,
            "arguments": list(arguments),
            "directory": str(cwd or Path.cwd()),
            "environment": {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            "output": str(streams[0]),
            "error": str(streams[1]),
            "fresh_ranks": fresh_ranks,
        }
        launches = any(word.startswith(("strategy=", "launch.devices=")) for word in arguments)
        process = forked(COMMAND_PROGRAM, settings, of_ranks=launches)
        self._started.append(process)
        return Command(process=process, arguments=arguments, streams=streams)

    def close(self) -> None:
        for process in self._started:
            if process.is_alive():
                process.kill()
            process.join()


@dataclass(frozen=True, kw_only=True)
class Command:
    """Started command."""

    process: BaseProcess
    arguments: tuple[str, ...]
    streams: tuple[Path, Path]

    def end(self, *, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        self.process.join(seconds)
        told = [stream.read_text() if stream.is_file() else "" for stream in self.streams]
        assert self.process.exitcode is not None, f"it does not end within {seconds} s: {told}"
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, *told)


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with contextlib.closing(Commands(tmp_path_factory.mktemp("streams"))) as started:
        yield started
