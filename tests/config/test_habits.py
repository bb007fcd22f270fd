"""What users of Hydra, Lightning and lightning-hydra-template type runs, or is answered with the line that runs.

habits.txt: typed, and here. The answer's cures are pasted in the place of what they are about, all of them, until
nothing is left; what then stands there is the line, and it passes the check. docs/habits.md shows the same table.
"""

import inspect
import runpy
import shlex
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser
from lightning.pytorch import Trainer

HERE = Path(__file__).parent
PASTING = runpy.run_path(str(HERE / "pasting.py"))
answer, pasted = PASTING["answer"], PASTING["pasted"]
LINES = [line for line in (HERE / "habits.txt").read_text().splitlines() if line and not line.startswith("#")]
TABLE = [tuple(part.strip() for part in line.split(" | ")) for line in LINES]
IN_A_TEST = 8
MOST_ROUNDS = 4
RUNS, LEAVE_OUT = "runs", "leave out"
# What a command alone cannot have here; its own answer says what it is.
LAST = {
    "resume": "a checkpoint file that is there", "from_run": "a run directory", "launch.accelerator": "",
    "hydra/launcher": "the package", "strategy.name": "another strategy", "strategy": "", "launch.devices": "",
    "launch.nodes": "",
}  # fmt: skip
FILES = {
    "conf/db/mysql.yaml": "driver: mysql\nuser: omry\n",
    "conf/db/postgresql.yaml": "driver: postgresql\nuser: postgres\ntimeout: 10\n",
    "conf/small.yaml": "defaults:\n  - train\n  - override model: mlp\n  - _self_\nname: small\n",
    "conf/experiment/mine.yaml": "# @package _global_\nname: mine\n",
    "more/optimizer/mine.yaml": "_target_: torch.optim.SGD\nlr: 0.1\n",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with a config folder of one's own, as Hydra's tutorial has it."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def is_last(fault):
    return fault.key in LAST and LAST[fault.key] in fault.expected


def line_of(typed):
    """What a command becomes where every answer is followed, first cure first."""
    argv = shlex.split(typed)
    for _ in range(MOST_ROUNDS):
        found = answer(argv, whole=True)
        faults = [fault for fault in found if fault.cure == "Write resume=null" or not is_last(fault)]
        if not faults:
            return argv
        before = argv
        for fault in faults:
            # Of one without anything to type the cause is another.
            argv = next(iter(pasted(argv, fault)), argv)
        if argv == before:
            break
    raise AssertionError(f"{typed}: {shlex.join(argv)} is refused: {[str(fault) for fault in answer(argv)]}")


@pytest.mark.parametrize("first", range(0, len(TABLE), IN_A_TEST))
def test_what_is_typed_runs_or_is_answered_with_the_line_that_runs(first, place):
    for typed, here in TABLE[first : first + IN_A_TEST]:
        if here.startswith("eval "):  # a line for the shell, which tests/command runs
            (fault,) = answer(shlex.split(typed))
            assert fault.cure == f"Write {here}"
            continue
        wanted = shlex.split(typed) if here == RUNS else [] if here == LEAVE_OUT else shlex.split(here)
        assert sorted(line_of(typed)) == sorted(wanted), typed
        assert not any(place.joinpath("outputs").glob("*"))


def test_every_argument_of_the_trainer_is_in_the_table():
    typed = " ".join(line for line, _ in TABLE)
    names = [name for name in inspect.signature(Trainer.__init__).parameters if name != "self"]
    assert [name for name in names if f"trainer.{name}" not in typed] == []
    assert len(TABLE) >= 60


def test_every_flag_of_hydra_is_in_the_table():
    typed = " ".join(line for line, _ in TABLE).split()
    flags = [max(action.option_strings, key=len) for action in get_args_parser()._actions if action.option_strings]
    assert [flag for flag in flags if flag not in typed] == []
