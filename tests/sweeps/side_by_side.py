"""A sweep's loop around the local executor, as a command: `main()` with JOBS, each a list of overrides, from jobs.json.

What came of each job is written into ends.json, by number: its status or its error's kind and words.
"""

import contextlib
import json
import sys
from pathlib import Path

import exp
from exp.errors import ExpError
from exp.launch.supervision import collected_signals
from exp.output import outliving_output
from exp.sweeps.executor import Work
from exp.sweeps.job import JobProcesses
from exp.sweeps.local import LocalExecutor
from exp.train import fit, validate


def main() -> int:
    jobs = json.loads(Path("jobs.json").read_text())
    with outliving_output(), contextlib.closing(LocalExecutor(JobProcesses(fit, validate))) as executor:
        executor.warm_up()
        configs = [
            exp.compose([f"hydra.run.dir={Path.cwd()}/runs/{number}", *sys.argv[1:], *overrides])
            for number, overrides in enumerate(jobs)
        ]
        faults = executor.check(configs)
        assert not any(faults), faults
        executor._jobs = configs[0].sweep.jobs
        waiting = [Work(jobs=(number,), configs=(config,)) for number, config in enumerate(configs)]
        found, running, passed_on = {}, 0, 0
        with collected_signals() as received:
            while running or (waiting and not received):
                while waiting and not received and running < executor.slots:
                    executor.start(waiting.pop(0))
                    running += 1
                for end in executor.ends(60):
                    assert end.job not in found
                    found[end.job] = told(end.outcome)
                    running -= 1
                for signum in received[passed_on:]:
                    executor.end(signum)
                    passed_on += 1
        slots = executor.slots
    Path("ends.json").write_text(json.dumps({"slots": slots, "ends": list(found.items())}))
    return 0


def told(outcome) -> list[str]:
    if isinstance(outcome, ExpError):
        return [type(outcome).__name__, str(outcome)]
    return [outcome.status, ""]
