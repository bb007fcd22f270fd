"""exp.doctor on working and broken installations, and on machines with GPUs that torch cannot use."""

import importlib.metadata
import os
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from exp.extras.doctor import doctor, installation, machine, torch_findings
from exp.extras.doctor.machine import GIB
from exp.extras.doctor.probe import attempt

INSTALLED = ModuleSpec("torch", None, origin="/env/site-packages/torch/__init__.py")


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """A function that runs the command and returns its exit status and lines."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = doctor.main(list(arguments))
        return status, capsys.readouterr().out.splitlines()

    return run


def test_a_working_torch_has_no_error(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    trials = {what: attempt(what) for what in ("torch", "run:cpu", "import")}
    assert not [trial for trial in trials.values() if "error" in trial]
    run = torch_findings.run_finding("cpu", trials["run:cpu"])
    assert (run.state, torch_findings.import_finding(trials["import"]).state) == ("ok", "ok")


@pytest.mark.slow
def test_a_working_machine_trains(command):
    status, lines = command()
    assert (status, lines[-1]) == (0, "all well"), lines
    assert any(line.startswith("ok") and "run on cpu" in line for line in lines)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart.so.13"),
        ("import os; os.abort()", "ended by SIGABRT"),
    ],
)
def test_a_module_that_hides_torch_is_named(command, monkeypatch, tmp_path, content, words):
    (tmp_path / "first" / "torch").mkdir(parents=True)
    (tmp_path / "first" / "torch" / "__init__.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'first'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    status, lines = command("--quick")
    assert status == 1
    (error,) = [index for index, line in enumerate(lines) if line.startswith("error  torch")]
    assert words in lines[error]
    assert f"Take {tmp_path / 'first'} off PYTHONPATH" in lines[error + 1]


def test_the_error_of_torch_decides_the_fix():
    def fix(error):
        return torch_findings.explain_import_error(error, INSTALLED).fix

    assert "pip uninstall -y torch" in fix("ImportError: cannot import name '_C'")
    assert torch_findings.explain_import_error("ModuleNotFoundError: x", None).fix.startswith("pip install 'torch")


def test_nvidia_smi_is_asked_for_gpus(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 570.86.15\necho 570.86.15\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert machine.nvidia_drivers() == ["570.86.15"] * 2


def gpu(**changed):
    """Return the facts that the probe finds about a GPU, with changes."""
    return {"name": "NVIDIA H100", "capability": "9.0", "free": 70 * GIB, "total": 80 * GIB, "error": "", **changed}


def gpu_states(*, drivers=("580.65", "580.65"), environment=None, seen=(), cuda="13.0", cuda_error=""):
    torch = {"cuda": cuda, "gpus": list(seen), "cuda_error": cuda_error}
    found = list(torch_findings.gpu_findings(torch, drivers=drivers, environment=environment or {}))
    assert all(one.fix for one in found if one.state == "error")
    return {one.part: one for one in found}


def test_visible_and_hidden_gpus_are_listed():
    found = gpu_states(seen=[gpu(), gpu(free=GIB)])
    assert [one.state for one in found.values()] == ["ok", "ok", "note"]
    assert "NVIDIA H100, capability 9.0, 70.0 of 80.0 GiB free" in found["cuda:0"].found
    hidden = gpu_states(environment={"CUDA_VISIBLE_DEVICES": "-1"}, cuda_error="No CUDA GPUs are available")["CUDA"]
    assert (hidden.state, "unset CUDA_VISIBLE_DEVICES" in hidden.fix) == ("error", True)
    some = gpu_states(environment={"CUDA_VISIBLE_DEVICES": "1"}, seen=[gpu()])["CUDA"]
    assert "sees 1 of 2 NVIDIA GPUs" in some.found


def test_a_build_without_kernels_is_named():
    error = "CUDA error: no kernel image is available for execution on the device"
    found = gpu_states(seen=[gpu(name="NVIDIA B200", error=error)])["cuda:0"]
    assert (found.state, "no kernel image" in found.found) == ("error", True)


def test_a_missing_or_old_driver_is_named():
    error = "The NVIDIA driver on your system is too old (found version 12020)."
    old = gpu_states(drivers=["535.1"], cuda_error=error)["CUDA"]
    assert (old.state, "Update NVIDIA's driver" in old.fix) == ("error", True)
    hangs = gpu_states(cuda_error="CUDA unknown error - this may be due to an incorrectly set up environment")["CUDA"]
    assert (hangs.state, "nvidia-smi" in hangs.fix, "unknown error" in hangs.found) == ("error", True, True)
    # A machine without a GPU and with torch's default wheel.
    none = gpu_states(drivers=[], cuda_error="Found no NVIDIA driver on your system.")["CUDA"]
    assert (none.state, "--gpus all" in none.fix) == ("note", True)
    cpu = gpu_states(drivers=["580.65"], cuda=None)["CUDA"]
    assert (cpu.state, "built for the CPU only" in cpu.found) == ("error", True)


def test_failing_runs_are_named():
    assert torch_findings.run_finding("cuda", {"loss": 2.0}).state == "ok"
    crashed = torch_findings.run_finding("cuda", {"error": "its process was ended by SIGSEGV"})
    assert (crashed.state, "SIGSEGV" in crashed.found) == ("error", True)


@pytest.mark.slow
def test_a_trial_that_crashes_is_an_error(tmp_path, monkeypatch):
    assert "nothing" in doctor.try_in_process("run:nothing")["error"]
    (tmp_path / "torchvision.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert "SIGSEGV" in doctor.try_in_process("import")["error"]
    assert torch_findings.import_finding({"error": "OSError: torchvision/_C.so"}).fix.startswith("Install torch and")


def test_versions_outside_the_ranges_are_named():
    needed = [
        "torch>=99", "numpy>=1", "not-there-at-all>=2", "never; python_version < '3'", "rich>=99; extra == 'search'",
        "not-there-either; extra == 'none'",
    ]  # fmt: skip
    *wrong, well = installation.versions(needed)
    assert [one.state for one in wrong] == ["error"] * 3
    assert ("expected >=99" in wrong[0].found, "not-there-at-all" in wrong[1].found) == (True, True)
    assert "rich" in wrong[2].found
    assert f"numpy {importlib.metadata.version('numpy')}" in well.found


def test_the_fix_names_the_supported_torch():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert torch_findings.REQUIREMENT.strip("'") in project["dependencies"]


def test_disks_are_judged(tmp_path):
    well = machine.disk("temporary files", tmp_path / "not" / "yet")
    assert (well.state, str(tmp_path) in well.found) == ("ok", True)
    assert machine.disk("outputs", tmp_path, least=2**60).state == "error"


def test_outputs_that_are_no_directory_are_an_error(tmp_path):
    (tmp_path / "outputs").write_text("mine")
    found = machine.disk("outputs", tmp_path / "outputs" / "deep")
    assert (found.state, "Not a directory" in found.found, "another disk" in found.fix) == ("error", True, True)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no /proc")
def test_a_directory_without_write_access_is_an_error():
    assert machine.disk("outputs", Path("/proc")).state == "error"
