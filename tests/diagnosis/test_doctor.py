"""exp.doctor on machines and installations that work, are broken, or have GPUs that torch cannot use."""

import errno
import os
import tomllib
from pathlib import Path

import pytest

from exp.extras.doctor import doctor, installation, machine, torch_findings
from exp.extras.doctor.machine import GIB, Nvidia
from exp.extras.doctor.probe import tried as tried_here
from exp.extras.doctor.trial_process import tried


@pytest.fixture
def quick(monkeypatch, tmp_path, capsys):
    """A function that returns the status and the lines of the command, which imports one other package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")

    def run(*arguments, files=None, words=()):
        for name, text in (files or {}).items():
            path = tmp_path / "first" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            monkeypatch.setenv("PYTHONPATH", str(tmp_path / "first"))
        status = doctor.main(list(arguments), modules={"numpy": "numpy"}, words=words)
        return status, capsys.readouterr().out.splitlines()

    return run


def fixes(lines):
    """Return the part and the fix of each error."""
    return {line.split(maxsplit=2)[1]: lines[index + 1] for index, line in enumerate(lines) if line.startswith("fault")}


def test_a_working_torch_has_no_error(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    trials = {what: tried_here(what) for what in ("torch", "group:gloo", "run:cpu:fp32", "import:numpy")}
    torch, findings = trials["torch"], torch_findings
    found = [*findings.torch_findings(torch), *findings.group_findings({**torch, "gpus": []}, trials)]
    found += [*findings.run_findings(trials), *findings.import_findings(trials, {"numpy": "numpy"})]
    assert [one.part for one in found if one.state == "ok"] == ["torch", "gloo", "NCCL", "runs on cpu", "imports"]


@pytest.mark.slow
def test_a_working_machine_trains(quick):
    status, lines = quick(words=("fp32", "bf16", "fp8"))
    assert (status, lines[-1]) == (0, "all well"), lines
    (runs,) = [line for line in lines if "runs on cpu" in line]
    assert "fp32, bf16: three steps each" in runs
    assert any(line.startswith("note") and "fp8 on cpu" in line and "Hopper" in line for line in lines)
    assert any(line.startswith("ok") and "a process group of one rank works" in line for line in lines)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart.so.13"),
        ("import os; os.abort()", "ended by SIGABRT"),
    ],
)
def test_a_module_that_hides_torch_is_named(quick, tmp_path, content, words):
    status, lines = quick("--quick", files={"torch/__init__.py": content})
    assert status == 1
    assert any(line.startswith("fault  torch") and words in line for line in lines), lines
    assert f"Take {tmp_path / 'first'} off PYTHONPATH" in fixes(lines)["torch"]


def test_the_error_of_torch_decides_the_fix():
    here = {"place": "/env/torch", "installed": Path("/env/torch")}

    def cure(text, kind="ImportError"):
        return torch_findings.broken({"error": {"type": kind, "text": text}}, **here).cure

    assert "pip uninstall -y torch" in cure("cannot import name '_C'")
    assert "libcudnn.so.9 comes with torch's own" in cure("libcudnn.so.9: cannot open shared object file: x")
    assert "apt-get install libgomp1" in cure("libgomp.so.1: cannot open shared object file: No such file")
    assert "newer system" in cure("/lib/libm.so.6: version `GLIBC_2.38' not found")
    assert "processor" in torch_findings.broken({"died": "its process was ended by SIGILL"}, **here).cure
    missing = torch_findings.broken({"error": {"type": "ModuleNotFoundError", "text": "x"}}, place=None, installed=None)
    assert missing.cure.startswith("pip install 'torch")


def test_nvidia_smi_is_asked_for_gpus(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 570.86.15\necho 570.86.15\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert machine.nvidia().gpus >= 2
    assert machine.nvidia().driver is not None


def facts(**changed):
    """Return what the probe finds in a build with CUDA."""
    gpu = {"name": "NVIDIA H100", "capability": [9, 0], "free": 70 * GIB, "total": 80 * GIB}
    groups = {"distributed": True, "gloo": True, "nccl": True, "nccl_version": "2.27.5"}
    plain = {"cuda": "13.0", "hip": None, "mps": False, "mps_built": False, "cudnn": 91002, "cuda_error": None}
    return {**plain, "gpus": [gpu, gpu], "archs": ["sm_80", "sm_90", "compute_90"], "groups": groups, **changed}


def gpu_states(nvidia, environment=None, **changed):
    found = list(torch_findings.gpu_findings(facts(**changed), nvidia, environment or {}))
    assert all(one.cure for one in found if one.state == "fault")
    return {one.part: one for one in found}


TWO = Nvidia(gpus=2, driver="580.65", cuda="13.0")


def test_visible_and_hidden_gpus_are_listed():
    found = gpu_states(TWO)
    assert [one.state for one in found.values()] == ["ok"] * 4
    assert "NVIDIA H100, capability 9.0, 70.0 of 80.0 GiB free" in found["cuda:1"].found
    hidden = gpu_states(TWO, {"CUDA_VISIBLE_DEVICES": "-1"}, gpus=[], cuda_error="No CUDA GPUs are available")["CUDA"]
    assert (hidden.state, "unset CUDA_VISIBLE_DEVICES" in hidden.cure) == ("fault", True)
    assert "CUDA_VISIBLE_DEVICES='-1' hides 2 GPUs of this machine" in hidden.found
    some = gpu_states(TWO, {"CUDA_VISIBLE_DEVICES": "1"}, gpus=facts()["gpus"][:1])
    assert "torch sees 1 of 2" in some["CUDA_VISIBLE_DEVICES"].found


def test_a_build_without_kernels_is_named():
    new = {"name": "NVIDIA B200", "capability": [10, 0], "free": GIB, "total": GIB}
    found = gpu_states(TWO, gpus=[new], archs=["sm_80", "sm_90a"])["cuda:0"]
    assert (found.state, "kernels for sm_80, sm_90a alone" in found.found) == ("fault", True)


def test_a_missing_or_old_driver_is_named():
    error = "The NVIDIA driver on your system is too old (found version 12020)."
    old = gpu_states(Nvidia(gpus=1, driver="535.1", cuda="12.2"), gpus=[], cuda_error=error)["CUDA"]
    assert (old.state, "CUDA 13.0" in old.found, "CUDA 12.2" in old.cure) == ("fault", True, True)
    error = "Found no NVIDIA driver on your system."
    none = gpu_states(Nvidia(gpus=1, driver=None, cuda=None), gpus=[], cuda_error=error)["CUDA"]
    assert (none.state, "driver" in none.cure) == ("fault", True)
    unknown = "CUDA unknown error - this may be due to an incorrectly set up environment"
    hangs = gpu_states(TWO, gpus=[], cuda_error=unknown)["CUDA"]
    assert (hangs.state, "nvidia-smi" in hangs.cure, unknown in hangs.found) == ("fault", True, True)
    # A laptop without GPUs and with the wheel of pip.
    assert gpu_states(Nvidia(gpus=0, driver=None, cuda=None), gpus=[], cuda_error=error)["CUDA"].state == "note"
    cpu = gpu_states(Nvidia(gpus=1, driver="580.65", cuda="13.0"), gpus=[], cuda=None)["CUDA"]
    assert (cpu.state, "build for the CPU alone" in cpu.found) == ("fault", True)


def test_failing_groups_and_runs_are_named():
    died = {
        "group:gloo": {"error": {"type": "RuntimeError", "text": "Unable to resolve hostname"}},
        "group:nccl": {"sum": 4.0},
    }
    gloo, nccl = torch_findings.group_findings(facts(), died)
    assert ("hostname" in gloo.found, "/etc/hosts" in gloo.cure, nccl.state) == (True, True, "ok")
    gloo, _ = torch_findings.group_findings(facts(gpus=[], groups={**facts()["groups"], "gloo": False}), {})
    assert "strategy=single needs none" in gloo.cure
    without = facts(groups={"distributed": True, "gloo": True, "nccl": False, "nccl_version": None})
    _, nccl = torch_findings.group_findings(without, {"group:gloo": {"sum": 4.0}})
    assert (nccl.state, "launch.backend=gloo" in nccl.cure) == ("fault", True)
    trials = {
        "run:cuda:fp32": {"loss": 2.0, "seconds": 1.0},
        "run:cuda:bf16": {"loss": 7.5, "seconds": 1.0},
        "run:cuda:fp16": {"died": "its process was ended by SIGSEGV"},
    }
    found = {one.part: one for one in torch_findings.run_findings(trials)}
    assert found["runs on cuda"].state == "ok"
    assert "7.5, and 2 in fp32" in found["bf16 on cuda"].found
    assert "SIGSEGV" in found["fp16 on cuda"].found


def test_a_trial_that_crashes_ends_no_other(tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = tried(["import:json", "import:deadly", "import:not_there", "import:csv"])
    assert found["import:deadly"] == {"died": "its process was ended by SIGSEGV"}
    assert found["import:not_there"]["error"]["type"] == "ModuleNotFoundError"
    assert {"version"} <= found["import:json"].keys() & found["import:csv"].keys()


def test_another_package_called_exp_is_named(tmp_path, monkeypatch):
    info = tmp_path / "exp-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: exp\nVersion: 0.3\n")
    (info / "RECORD").write_text("exp/__init__.py,,\nexp-0.3.dist-info/METADATA,,\n")
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    clash, hidden = installation.clashes()
    assert (clash.state, "pip uninstall -y exp" in clash.cure) == ("fault", True)
    assert str(tmp_path / "exp") in hidden.found


def test_versions_outside_the_ranges_are_named():
    needed = installation.Declared(
        source="pyproject.toml",
        requirements=["torch>=99", "numpy>=1", "not-there-at-all>=2", "never; python_version < '3'"],
        extras={"search": ["rich>=99"], "none": ["not-there-either"]},
    )
    found = list(installation.versions(needed))
    wrong = [one.found for one in found if one.state == "fault"]
    assert len(wrong) == 3, wrong
    assert ("asks for >=99" in wrong[0], "not-there-at-all" in wrong[1], "rich" in wrong[2]) == (True, True, True)
    assert any("numpy" in one.found for one in found if one.state == "ok")
    assert any("none" in one.found for one in found if one.state == "note")


def test_the_fix_names_the_supported_torch():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert torch_findings.REQUIREMENT.strip("'") in project["dependencies"]
    assert installation.declared().requirements == project["dependencies"]
    assert project["requires-python"] == ">=" + ".".join(map(str, installation.LEAST_PYTHON))
    assert installation.python((3, 10, 2)).state == "fault"


def test_disks_and_threads_are_judged(tmp_path):
    (well,) = machine.disk("outputs", tmp_path / "not" / "yet")
    assert (well.state, str(tmp_path) in well.found) == ("ok", True) or well.state == "note"
    (full,) = machine.disk("outputs", tmp_path, least=2**60)
    assert full.state == "fault"
    for number, words, is_mode in ((errno.EROFS, "Read-only", False), (errno.EACCES, "Permission denied", True)):
        closed = machine.unwritable("outputs", tmp_path, OSError(number, os.strerror(number)))
        assert (closed.state, words in closed.found, "chmod" in closed.cure) == ("fault", True, is_mode)
    texts = ("x", "9", "1")
    states = [[one.state for one in machine.threads({"OMP_NUM_THREADS": text}, cores=2)][-1] for text in texts]
    assert states == ["fault", "note", "note"]
    assert machine.file_system(tmp_path, mounts=tmp_path / "none") == ("", "?")


def test_outputs_that_are_no_directory_are_an_error(tmp_path):
    (tmp_path / "outputs").write_text("mine")
    (found,) = machine.disk("outputs", tmp_path / "outputs" / "deep")
    assert found.state == "fault"
    assert found.found == f"{tmp_path / 'outputs'} is a file, where a directory must be"
    assert f"mv {tmp_path / 'outputs'} " in found.cure


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no /proc")
def test_a_file_system_without_files_is_an_error():
    (found,) = machine.disk("outputs", Path("/proc"))
    assert (found.state, "chmod" in found.cure, "directory of your own" in found.cure) == ("fault", False, True)
