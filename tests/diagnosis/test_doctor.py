"""The doctor on machines and installations that are well, broken in one place, or have GPUs that torch cannot use."""

import errno
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from exp import doctor
from exp.diagnosis import installation, machine, torch_findings
from exp.diagnosis.machine import GIB, Nvidia
from exp.diagnosis.trial_process import tried

# As if torch had been built without gloo: the class is taken away before torch.distributed asks for it.
WITHOUT_GLOO = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed.distributed_c10d":
            del sys.modules["torch._C._distributed_c10d"].ProcessGroupGloo
sys.meta_path.insert(0, Hidden())
"""
# As a build with CUDA answers where CUDA_VISIBLE_DEVICES hides every GPU (the words of torch 2.13).
HIDDEN_CUDA = """
import importlib.machinery, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name not in ("torch.version", "torch.cuda"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module
        def changed(module):
            load(module)
            if name == "torch.version":
                module.cuda = "13.0"
            else:
                def init():
                    raise RuntimeError("No CUDA GPUs are available")
                module.init = init
        spec.loader.exec_module = changed
        return spec
sys.meta_path.insert(0, Hidden())
"""
NVIDIA_SMI = "#!/bin/sh\necho 570.86.15\necho 570.86.15\n"


@pytest.fixture
def quick(monkeypatch, tmp_path, capsys):
    """The command's status and lines, importing of the other packages one alone."""
    monkeypatch.setattr(doctor, "MODULES", {"numpy": "numpy"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")

    def run(*arguments, files=None):
        for name, text in (files or {}).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        if files:
            monkeypatch.setenv("PYTHONPATH", str(tmp_path / "first"))
        return doctor.main(list(arguments)), capsys.readouterr().out.splitlines()

    return run


def cures(lines):
    """Part and cure of each fault."""
    return {line.split(maxsplit=2)[1]: lines[index + 1] for index, line in enumerate(lines) if line.startswith("fault")}


def test_a_sound_machine_is_well_and_trains(quick, monkeypatch):
    monkeypatch.setattr(doctor, "WORDS", ("fp32", "bf16", "fp8"))
    status, lines = quick()
    assert (status, lines[-1]) == (0, "all well"), lines
    (runs,) = [line for line in lines if "runs on cpu" in line]
    assert "fp32, bf16: three steps each" in runs
    assert any(line.startswith("note") and "fp8 on cpu" in line and "Hopper" in line for line in lines)
    assert any(line.startswith("ok") and "a process group of one rank works" in line for line in lines)
    assert list(Path().iterdir()) == [], "it leaves nothing behind"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart.so.13"),
        ("", "half installed"),
        ("import os; os._exit(7)", "ended with status 7"),
        ("import os; os.abort()", "ended by SIGABRT"),
    ],
)
def test_a_torch_that_hides_the_installed_one_is_named(quick, tmp_path, content, words):
    status, lines = quick("--quick", files={"first/torch/__init__.py": content})
    assert status == 1
    assert any(line.startswith("fault  torch") and words in line for line in lines), lines
    assert f"Take {tmp_path / 'first'} off PYTHONPATH" in cures(lines)["torch"]


def test_a_doctor_beside_a_broken_torch_shows_no_traceback(tmp_path):
    """In an interpreter of its own: nothing heavy is imported before it has looked."""
    broken = tmp_path / "torch" / "__init__.py"
    broken.parent.mkdir()
    broken.write_text("raise RuntimeError('broken')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "exp.doctor"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "RuntimeError: broken" in done.stdout


def test_an_installed_torch_that_is_broken_is_installed_again():
    here = {"place": "/env/torch", "installed": Path("/env/torch")}

    def cure(text, kind="ImportError"):
        return torch_findings.broken({"error": {"type": kind, "text": text}}, **here).cure

    assert "pip uninstall -y torch" in cure("cannot import name '_C'")
    assert "libcudnn.so.9 comes with torch's own requirements" in cure(
        "libcudnn.so.9: cannot open shared object file: x"
    )
    assert "apt-get install libgomp1" in cure("libgomp.so.1: cannot open shared object file: No such file")
    assert "newer system" in cure("/lib/libm.so.6: version `GLIBC_2.38' not found")
    assert "processor" in torch_findings.broken({"died": "its process was ended by SIGILL"}, **here).cure
    missing = torch_findings.broken({"error": {"type": "ModuleNotFoundError", "text": "x"}}, place=None, installed=None)
    assert missing.cure.startswith("pip install 'torch")


def test_a_torch_without_gloo_is_named(quick):
    status, lines = quick("--quick", files={"first/sitecustomize.py": WITHOUT_GLOO})
    assert status == 1
    assert "strategy=single needs none" in cures(lines)["gloo"]


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_a_variable_hides_are_named(quick, monkeypatch, tmp_path, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "MODULES", {})
    files = {"first/sitecustomize.py": HIDDEN_CUDA, "first/nvidia-smi": NVIDIA_SMI}
    status, lines = quick("--quick", files=files)
    assert status == 1
    assert any(f"CUDA_VISIBLE_DEVICES={hidden!r} hides 2 GPUs of this machine" in line for line in lines), lines
    assert "unset CUDA_VISIBLE_DEVICES" in cures(lines)["CUDA"]


def facts(**changed):
    """As the probe has them of a build with CUDA."""
    gpu = {"name": "NVIDIA H100", "capability": [9, 0], "free": 70 * GIB, "total": 80 * GIB}
    groups = {"distributed": True, "gloo": True, "nccl": True, "nccl_version": "2.27.5"}
    plain = {"cuda": "13.0", "hip": None, "mps": False, "mps_built": False, "cudnn": 91002, "cuda_error": None}
    return {**plain, "gpus": [gpu, gpu], "archs": ["sm_80", "sm_90", "compute_90"], "groups": groups, **changed}


def gpu_states(nvidia, environment=None, **changed):
    found = list(torch_findings.gpu_findings(facts(**changed), nvidia, environment or {}))
    assert all(one.cure for one in found if one.state == "fault")
    return {one.part: one for one in found}


TWO = Nvidia(gpus=2, driver="580.65", cuda="13.0")


def test_gpus_that_work_are_listed():
    found = gpu_states(TWO)
    assert [one.state for one in found.values()] == ["ok"] * 4
    assert "NVIDIA H100, capability 9.0, 70.0 of 80.0 GiB free" in found["cuda:1"].found
    some = gpu_states(TWO, {"CUDA_VISIBLE_DEVICES": "1"}, gpus=facts()["gpus"][:1])
    assert "torch sees 1 of 2" in some["CUDA_VISIBLE_DEVICES"].found


def test_a_build_without_the_kernels_of_a_gpu_is_named():
    new = {"name": "NVIDIA B200", "capability": [10, 0], "free": GIB, "total": GIB}
    found = gpu_states(TWO, gpus=[new], archs=["sm_80", "sm_90"])
    assert found["cuda:0"].state == "fault"
    assert "kernels for sm_80, sm_90 alone" in found["cuda:0"].found
    assert gpu_states(TWO, gpus=[new])["cuda:0"].state == "ok", "compute_90 is compiled for it when it is loaded"


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((8, 6), ["sm_80"], True),  # of the same generation, and no newer
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_86"], False),
        ((12, 0), ["compute_90"], True),
        ((12, 1), ["sm_90a"], False),
        ((9, 0), ["sm_90a"], True),
        ((7, 0), ["sm_75", "compute_90"], False),
    ],
)
def test_kernels_run_where_nvidia_says_so(capability, archs, runs):
    assert torch_findings.has_kernels(capability, archs) is runs


def test_a_driver_that_is_missing_or_old_is_named():
    error = "The NVIDIA driver on your system is too old (found version 12020)."
    old = gpu_states(Nvidia(gpus=1, driver="535.1", cuda="12.2"), gpus=[], cuda_error=error)["CUDA"]
    assert (old.state, "CUDA 13.0" in old.found, "CUDA 12.2" in old.cure) == ("fault", True, True)
    error = "Found no NVIDIA driver on your system."
    none = gpu_states(Nvidia(gpus=1, driver=None, cuda=None), gpus=[], cuda_error=error)["CUDA"]
    assert (none.state, "driver" in none.cure) == ("fault", True)
    unknown = "CUDA unknown error - this may be due to an incorrectly set up environment"
    hangs = gpu_states(TWO, gpus=[], cuda_error=unknown)["CUDA"]
    assert (hangs.state, "nvidia-smi" in hangs.cure, unknown in hangs.found) == ("fault", True, True)
    # A laptop with what pip installs.
    assert gpu_states(Nvidia(gpus=0, driver=None, cuda=None), gpus=[], cuda_error=error)["CUDA"].state == "note"
    cpu = gpu_states(Nvidia(gpus=1, driver="580.65", cuda="13.0"), gpus=[], cuda=None)["CUDA"]
    assert (cpu.state, "build for the CPU alone" in cpu.found) == ("fault", True)


def test_groups_and_runs_that_fail_are_named():
    died = {
        "group:gloo": {"error": {"type": "RuntimeError", "text": "Unable to resolve hostname"}},
        "group:nccl": {"sum": 4.0},
    }
    gloo, nccl = torch_findings.group_findings(facts(), died)
    assert ("hostname" in gloo.found, "/etc/hosts" in gloo.cure, nccl.state) == (True, True, "ok")
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


def test_a_try_that_ends_its_process_takes_no_other_with_it(tmp_path, monkeypatch):
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


def test_versions_outside_of_the_ranges_are_named():
    needed = installation.Declared(
        source="pyproject.toml",
        requirements=[
            "torch>=99",
            "numpy>=1",
            "not-there-at-all>=2; python_version > '3'",
            "never; python_version < '3'",
        ],
        extras={"search": ["rich>=99"], "none": ["not-there-either"]},
    )
    found = list(installation.versions(needed))
    told = [one.found for one in found if one.state == "fault"]
    assert len(told) == 3, told
    assert ("asks for >=99" in told[0], "not-there-at-all" in told[1], "rich" in told[2]) == (True, True, True)
    assert any("numpy" in one.found for one in found if one.state == "ok")
    assert any("none" in one.found for one in found if one.state == "note")


def test_the_cure_of_torch_asks_for_the_range_of_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert torch_findings.REQUIREMENT.strip("'") in project["dependencies"]
    assert installation.declared().requirements == project["dependencies"]
    assert project["requires-python"] == ">=" + ".".join(map(str, installation.LEAST_PYTHON))
    assert installation.python((3, 10, 2)).state == "fault"


def test_disks_and_threads_are_judged(tmp_path, monkeypatch):
    (well,) = machine.disk("outputs", tmp_path / "not" / "yet")
    assert (well.state, str(tmp_path) in well.found) == ("ok", True) or well.state == "note"
    (full,) = machine.disk("outputs", tmp_path, least=2**60)
    assert full.state == "fault"
    for number, words, is_mode in ((errno.EROFS, "Read-only", False), (errno.EACCES, "Permission denied", True)):
        monkeypatch.setattr(machine, "_write_error", lambda place, number=number: OSError(number, os.strerror(number)))
        (closed,) = machine.disk("outputs", tmp_path)
        assert (closed.state, words in closed.found, "chmod" in closed.cure) == ("fault", True, is_mode)
    states = {
        text: [one.state for one in machine.threads({"OMP_NUM_THREADS": text}, cores=2)][-1] for text in ("x", "9", "1")
    }
    assert states == {"x": "fault", "9": "note", "1": "note"}


@pytest.mark.parametrize("below", [(), ("deep", "er")])
def test_a_file_in_the_place_of_outputs_is_a_fault(tmp_path, below):
    (tmp_path / "outputs").write_text("mine")
    (found,) = machine.disk("outputs", tmp_path.joinpath("outputs", *below))
    assert found.state == "fault"
    assert found.found == f"{tmp_path / 'outputs'} is a file, where a directory must be"
    assert f"mv {tmp_path / 'outputs'} " in found.cure


def test_a_link_to_nowhere_in_the_place_of_outputs_is_a_fault(tmp_path):
    (tmp_path / "outputs").symlink_to(tmp_path / "gone")
    (found,) = machine.disk("outputs", tmp_path / "outputs")
    assert (found.state, f"a link to {tmp_path / 'gone'}, which is not there" in found.found) == ("fault", True)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no /proc")
def test_no_mode_is_blamed_for_a_place_that_takes_no_files():
    (found,) = machine.disk("outputs", Path("/proc"))
    assert (found.state, "chmod" in found.cure, "directory of your own" in found.cure) == ("fault", False, True)


def test_the_file_system_is_the_one_that_was_mounted_last(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"23 22 0:5 / {tmp_path}/a\\040b rw shared:1 - nfs4 server:/ rw\n"
        f"24 22 0:6 / {tmp_path}/a\\040b rw - tmpfs tmpfs rw\n"
    )
    (tmp_path / "a b").mkdir()
    assert machine.file_system(tmp_path / "a b", mounts=mounts) == ("tmpfs", f"{tmp_path}/a b")
    assert machine.file_system(tmp_path, mounts=mounts) == ("ext4", "/")
    assert machine.file_system(tmp_path, mounts=tmp_path / "none") == ("", "?")
