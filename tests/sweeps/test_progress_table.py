"""What a sweep shows while it runs: lines where nobody watches, a table of the running jobs on a terminal."""

import io
import sys

import pytest

from exp.sweeps.progress_table import Progress
from exp.sweeps.results import Row


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def row(job, status="completed", value=0.25, **others):
    return Row(
        job=job, swept={"optimizer.lr": "0.1"}, status=status, monitor="loss/val", mode="min", value=value, **others
    )


@pytest.fixture
def shown(tmp_path):
    """A sweep of three jobs, one of which has ended well and one has failed."""

    def shown() -> None:
        progress = Progress(total=3)
        for job in range(3):
            directory = tmp_path / str(job)
            directory.mkdir()
            progress.begin(job, swept={"optimizer.lr": f"0.{job}"}, directory=directory)
        (tmp_path / "2" / "output.log").write_text("epoch 1/9\nepoch 2/9  step 40  [x]\n")
        progress.end(row(0, seconds=1.25), best=row(0))
        progress.end(row(1, "failed", float("nan"), error="was killed by SIGSEGV"))
        progress.refresh()
        progress.close()

    return shown


LINES = [
    "job 0  completed  loss/val 0.25  optimizer.lr=0.1  1.2 s",
    "job 1  failed  optimizer.lr=0.1  0.0 s  was killed by SIGSEGV",
]


def test_without_a_terminal_each_job_that_has_ended_is_one_line(shown, capsys):
    shown()
    assert capsys.readouterr().out.splitlines() == LINES


def test_a_terminal_shows_the_running_jobs_with_their_last_line_below_those_that_have_ended(shown, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    shown()
    text = sys.stdout.getvalue()
    last = text[text.index(LINES[1]) :]
    assert text.index(LINES[0]) < text.index(LINES[1])
    assert "2 of 3 done  1 failed  best job 0, loss/val 0.25" in last
    assert "epoch 2/9  step 40  [x]" in last
    assert "optimizer.lr=0.2" in last
    assert "optimizer.lr=0.1" not in last[len(LINES[1]) :]
