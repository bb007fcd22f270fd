"""What a sweep shows while it runs: a line for each job that ends, and on a terminal a table of running jobs."""

import io
import sys

from exp.sweeps.progress_table import Progress
from exp.sweeps.results import Row

LINES = [
    "job 0  completed  loss/val 0.25  optimizer.lr=0.1  1.2 s",
    "job 1  failed  optimizer.lr=0.1  0.0 s  was killed by SIGSEGV",
]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def row(job, status="completed", value=0.25, **others):
    swept = {"optimizer.lr": "0.1"}
    return Row(job=job, swept=swept, status=status, monitor="loss/val", mode="min", value=value, **others)


def show(directory) -> None:
    """Show a sweep of three jobs: one completed, one failed, one running."""
    progress = Progress(total=3)
    for job in range(3):
        (directory / str(job)).mkdir(exist_ok=True)
        progress.begin(job, swept={"optimizer.lr": f"0.{job}"}, directory=directory / str(job))
    (directory / "2" / "output.log").write_text("epoch 1/9\nepoch 2/9  step 40  [x]\n")
    progress.end(row(0, seconds=1.25), best=row(0))
    progress.end(row(1, "failed", float("nan"), error="was killed by SIGSEGV"))
    progress.refresh()
    progress.close()


def test_finished_jobs_are_lines_and_running_jobs_a_table(tmp_path, capsys, monkeypatch):
    show(tmp_path)
    assert capsys.readouterr().out.splitlines() == LINES
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    show(tmp_path)
    text = sys.stdout.getvalue()
    last = text[text.index(LINES[1]) :]
    assert text.index(LINES[0]) < text.index(LINES[1])
    assert "2 of 3 done  1 failed  best job 0, loss/val 0.25" in last
    assert "epoch 2/9  step 40  [x]" in last
    assert "optimizer.lr=0.2" in last
    assert "optimizer.lr=0.1" not in last[len(LINES[1]) :]
