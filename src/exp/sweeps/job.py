"""Functions that check and run the jobs of a sweep in other processes.

Code of users may crash such a process. If the process dies during the check of a job, the job gets an error. If the
process dies during the run of a job, the table of the sweep lists the job with the status failed.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig

from exp.config.frozen import COMPOSITION, OUTPUT, read_frozen, read_overrides
from exp.config.reading import plain_values
from exp.config.settings import settings_of
from exp.errors import ConfigError, ExpError, Interrupted, RunError, config_error, one_line
from exp.launch.job_process import Died, call, collect, start_server
from exp.launch.launcher import last_checkpoint
from exp.launch.supervision import collect_signals
from exp.redaction import redact
from exp.run_report import Ongoing, Report, find_report, write_bad_end
from exp.signals import install_handler
from exp.strategies.placement import Machine
from exp.sweeps.devices import VISIBLE, Devices, Need, need_of, need_settings, visible_gpus
from exp.sweeps.jobs import unpack

# Modules that a run needs. The server imports these modules once for all jobs. A job imports all other modules.
MODULES = (
    "exp.start",
    "exp.check.step_flops",
    "exp.data.digits",
    "exp.hooks.memory",
    "exp.hooks.throughput",
    "exp.report_pictures",
    "exp.strategies.auto",
    "exp.tensorboard.logger",
    # Modules that are otherwise imported during a run, for class counts and pictures.
    "numpy.ma",
    "PIL.PngImagePlugin",
)

Result = TypeVar("Result")
# Function that checks a config. The second argument is the result of the same function for the previous config.
Validate = Callable[[DictConfig, Any], Any]
# KnownNeeds maps a result of `need_settings` to the need of a job and the machine. KnownNeed is one entry of it.
KnownNeeds = dict[str, tuple[Need, Machine]]
KnownNeed = tuple[str, tuple[Need, Machine]]


def check_all(validate: Validate, packed: Sequence[bytes]) -> Iterator[KnownNeed | ExpError]:
    """Check jobs in this process. For each job, yield the processes and GPUs that it needs, or its error.

    Args:
        validate: Function that checks a config.
        packed: Config of each job, as packed by `exp.sweeps.jobs.pack`.
    """
    install_handler(signal.SIG_DFL)  # after this call, only user code raises KeyboardInterrupt
    outer = {name: value for name, value in os.environ.items() if name == VISIBLE}
    known: KnownNeeds = {}
    before = None
    for config in map(unpack, packed):
        try:
            try:
                need = _show_gpus(config, outer, known)
            except Exception:
                validate(config, before)  # the error of `validate` has more details
                raise
            before = validate(config, before)
        except ExpError as error:
            error.__cause__ = error.__context__ = None
            yield error
        except BaseException as error:
            traceback.print_exc()
            yield _check_error(f"ended with {redact(one_line(error))}; the traceback is above")
        else:
            yield need


def _show_gpus(config: DictConfig, outer: Mapping[str, str], known: KnownNeeds) -> KnownNeed:
    """Set CUDA_VISIBLE_DEVICES so that this process sees as many GPUs as the job will get.

    The check of strategy=auto depends on the number of visible GPUs.

    Args:
        config: Config of the job.
        outer: CUDA_VISIBLE_DEVICES of this process before the checks. Empty if the variable is not set.
        known: Needs of earlier jobs. The need of this job is added.

    Returns:
        The key of the job in `known`, and the value at this key: the need of the job and the machine.
    """
    os.environ.pop(VISIBLE, None)
    os.environ.update(outer)
    wanted = need_settings(config)
    if wanted not in known:
        known[wanted] = need_of(config)
    need, machine = known[wanted]
    os.environ.update(visible_gpus(Devices.of(machine, outer).take(need)))
    return wanted, known[wanted]


def _check_error(how: str) -> ConfigError:
    """Return the error of a job after the process that checked the job ended abnormally.

    Args:
        how: Description of the end, such as "was killed by SIGSEGV".
    """
    fix = "The check runs the constructors and forwards of your classes. Leave the classes out one by one"
    got, expected = f"a config whose check {how}", "a check that ends without an exception"
    return config_error("config", got=got, expected=expected, fix=fix)


def run_job(fit: Callable[[DictConfig], Report], config: DictConfig) -> Report | ExpError:
    """Run a job in this process. Return its report, or the error that ended the job."""
    try:
        return fit(config)
    except ExpError as error:
        error.__cause__ = error.__context__ = None
        return error
    except Exception as error:
        traceback.print_exc()
        return RunError(f"{type(error).__name__}: {str(error).strip() or 'no message'}")


class JobProcesses:
    """Checker and runner of jobs. All jobs are checked in one process, and each job runs in a separate process.

    Args:
        fit: Function that runs a job: exp.start.fit_job. Another process must be able to import it by name.
        validate: Function that checks a job: exp.check.examination.check_job. Another process must be able to import it
            by name.

    Attributes:
        needs: For each result of `need_settings`, the need of the jobs with these settings, and the machine.
    """

    def __init__(self, fit: Callable[[DictConfig], Report], validate: Validate) -> None:
        self.fit, self._validate = fit, validate
        self.needs: KnownNeeds = {}

    def start(self) -> None:
        """Start the fork server, which imports the modules of a job while this process continues."""
        start_server("exp.sweeps.job_server")

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function in a process of the server, and return the result. See `exp.launch.job_process.call`."""
        self.start()
        return call(function, *arguments)

    def check(self, configs: Sequence[bytes]) -> list[ConfigError | None]:
        """Return the error of each job, or None for a job without errors.

        One process checks all jobs. If this process dies, another process checks the remaining jobs.

        Raises:
            ExpError: The check failed with an error that does not depend on a config.
            Interrupted: A signal arrived.
        """
        found: list[ConfigError | None] = []
        with collect_signals() as received:
            while len(found) < len(configs):
                self.start()
                results, died = collect(check_all, self._validate, configs[len(found) :])
                for result in results:
                    if isinstance(result, ConfigError):
                        found.append(result)
                    elif isinstance(result, ExpError):
                        raise result
                    else:
                        self.needs.update([result])
                        found.append(None)
                if len(found) < len(configs):
                    found.append(_check_error(str(died)))
            if received:  # a signal arrived after the last check
                raise Interrupted(signum=received[0], checkpoint=None)
        return found

    def __call__(self, config: DictConfig) -> Report:
        """Run a job in another process and return its report.

        Raises:
            ExpError: The error that ended the job.
            RunError: The process ended without a result.
        """
        directory = Path(config[COMPOSITION].directory)
        try:
            came = self.call(run_job, self.fit, config)
        except (Died, Interrupted) as error:
            bad = dead_job(directory, error) if isinstance(error, Died) else interruption_of(directory, error.signum)
            report_bad_end(directory, bad)
            raise bad from error
        if isinstance(came, ExpError):
            raise came
        return came


def dead_job(directory: Path, died: Died) -> RunError:
    """Return the error of a job after its process ended without a result."""
    return RunError(f"the process of the job {died}. Its output is in {os.path.relpath(directory / OUTPUT)}")


def interruption_of(directory: Path, signum: int) -> Interrupted:
    """Return the error of a job that a second signal killed. The error contains the path of the last checkpoint."""
    saved = last_checkpoint(directory)
    return Interrupted(signum=signum, checkpoint=None if saved is None else str(saved))


def report_bad_end(directory: Path, error: ExpError) -> None:
    """Write the report of a job after the process of the job ended without writing a report.

    If the run directory has no config.yaml, the job had not begun, and no report is written. If the report cannot be
    written, for example on a full disk, the reason is printed.
    """
    if not (directory / "config.yaml").is_file():
        return
    try:
        before = find_report(directory)
        ongoing = Ongoing(
            directory,
            settings_of(plain_values(read_frozen(directory))),
            overrides=read_overrides(directory),
            world_size=1 if before is None else before.world_size,
        )
        write_bad_end(ongoing, error, has_ranks=True)
    except RunError as second:
        print(second, file=sys.stderr)
