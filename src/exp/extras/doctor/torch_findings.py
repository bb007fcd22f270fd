"""What the probe's facts on torch, its devices, its process groups and the runs on them mean, and the cure of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from exp.errors import shortened
from exp.extras.doctor.finding import Finding, fault, note, ok
from exp.extras.doctor.installation import requirement
from exp.extras.doctor.machine import GIB, Nvidia
from exp.extras.doctor.trial_process import Facts

REQUIREMENT = requirement("torch")
AGAIN = f"pip uninstall -y torch, then pip install --no-cache-dir {REQUIREMENT}"
BUILD = "pip install the build of torch for your GPU, by the command that pytorch.org shows for it"
# Three steps in 16 bits are as near to those in 32 as that, by far.
MOST_APART = 0.05
HIDDEN = "CUDA_VISIBLE_DEVICES"


def broken(facts: Facts, *, place: str | None, installed: Path | None) -> Finding | None:
    """Say why torch cannot be imported; None where it can.

    place: where an import finds torch. installed: where pip has put it.
    """
    found = None if place is None else Path(place)
    if "error" not in facts and "died" not in facts:
        return None
    if found is None:
        return fault("torch", "it is not installed", f"pip install {REQUIREMENT}")
    where = f"importing it from {found} fails: {_failure(facts)}"
    if installed is None or found.resolve() != installed.resolve():
        then = (
            f"pip install {REQUIREMENT}" if installed is None else f"the one that is installed, {installed}, is found"
        )
        return fault("torch", where, f"Take {found.parent} off PYTHONPATH, or that folder away; then {then}")
    if "died" in facts:
        return fault("torch", where, _cure_of_death(facts["died"]))
    error = facts["error"]
    library = re.search(r"(lib[\w.+-]+\.so[\d.]*)[^:]*: cannot open shared object", error["text"])
    if library and library[1].startswith("libgomp"):
        return fault("torch", where, "Install the system's package libgomp1 (apt-get install libgomp1)")
    if "GLIBC" in error["text"]:
        return fault("torch", where, "This system is older than the wheel: take a newer system or container")
    if library:
        cure = f"{library[1]} comes with torch's own requirements: {AGAIN}, without --no-deps"
        return fault("torch", where, cure)
    return fault("torch", where, AGAIN)


def _cure_of_death(words: str) -> str:
    if "SIGILL" in words:
        return "Its instructions are not this processor's: install a build of torch for it"
    if "SIGKILL" in words:
        return "Most often memory: free some, or give the container more"
    if "did not end" in words:
        return "Most often a disk or a driver that hangs: look at dmesg, and at whether nvidia-smi comes to its end"
    return AGAIN


def torch_findings(facts: Facts) -> Iterator[Finding]:
    """Say what torch is, where it can be imported."""
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU alone"
    yield ok("torch", f"{facts['version']}, built for {build}, {facts['threads']} threads, {facts['file']}")
    if facts["sum"] != 499500.0:
        yield fault("torch", f"0 + 1 + ... + 999 is {facts['sum']} in float32", AGAIN)


def gpu_findings(facts: Facts, nvidia: Nvidia, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Say whether the GPUs of this machine can be used, and why they cannot. nvidia: what the system says of them."""
    if facts["mps_built"]:
        yield ok("mps", "usable") if facts["mps"] else note("mps", "built, and no Apple GPU can be used here")
    if facts["cuda"] is None and facts["hip"] is None:
        if nvidia.gpus:
            found = f"this machine has {_count(nvidia.gpus)}, and torch is a build for the CPU alone"
            yield fault("CUDA", found, f"pip uninstall -y torch, then {BUILD}")
        else:
            yield ok("CUDA", "not built into torch, and no NVIDIA GPU is in this machine: runs use the CPU")
        if HIDDEN in environment:
            words = f"{environment[HIDDEN]!r}, which a torch for the CPU alone does not read"
            yield note(HIDDEN, words, f"unset {HIDDEN} before you use a GPU")
        return
    if facts["gpus"]:
        yield from _seen(facts, nvidia, environment)
    else:
        yield _unseen(facts, nvidia, environment)


def _seen(facts: Facts, nvidia: Nvidia, environment: Mapping[str, str]) -> Iterator[Finding]:
    gpus: Sequence[Mapping[str, Any]] = facts["gpus"]
    driver = f", driver {nvidia.driver}" if nvidia.driver else ""
    newest = f" for CUDA up to {nvidia.cuda}" if nvidia.cuda else ""
    visible = environment.get(HIDDEN)
    yield ok("CUDA", f"{facts['cuda'] or facts['hip']} with {_count(len(gpus))}{driver}{newest}")
    if visible is not None:
        known = f" of {nvidia.gpus}" if nvidia.gpus > len(gpus) else ""
        yield note(HIDDEN, f"{visible!r}: torch sees {len(gpus)}{known}", f"unset {HIDDEN} for all" if known else None)
    for index, gpu in enumerate(gpus):
        free, total = gpu["free"] / GIB, gpu["total"] / GIB
        capability = tuple(gpu["capability"])
        words = f"{gpu['name']}, capability {capability[0]}.{capability[1]}, {free:.1f} of {total:.1f} GiB free"
        if facts["cuda"] and not has_kernels(capability, facts["archs"]):
            built = ", ".join(facts["archs"])
            yield fault(f"cuda:{index}", f"{words}; torch has kernels for {built} alone", f"Another build: {BUILD}")
        elif free < 0.05 * total:
            yield note(f"cuda:{index}", words, "Other programs hold its memory: nvidia-smi lists them")
        else:
            yield ok(f"cuda:{index}", words)
    if facts["cudnn"] is None:
        yield fault("cuDNN", "torch cannot use it", AGAIN)
    else:
        yield ok("cuDNN", str(facts["cudnn"]))


def has_kernels(capability: tuple[int, ...], archs: Sequence[str]) -> bool:
    """Whether a build runs on a GPU: machine code of the same generation and no newer, or PTX no newer than it.

    archs: as torch.cuda.get_arch_list gives them, such as sm_86 and compute_90.
    Source: NVIDIA's CUDA C++ Programming Guide, 3.1.2 Binary Compatibility and 3.1.3 PTX Compatibility.
    """
    for arch in archs:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if found is None:
            continue
        built = int(found[2]), int(found[3])
        if found[4] == "a" and built != capability:  # of that very GPU
            continue
        if built <= capability and (found[1] == "compute" or built[0] == capability[0]):
            return True
    return False


def _unseen(facts: Facts, nvidia: Nvidia, environment: Mapping[str, str]) -> Finding:
    """Why a build with CUDA has no GPU."""
    visible = environment.get(HIDDEN)
    text = str(facts["cuda_error"] or "")
    if visible is not None and (nvidia.gpus or nvidia.driver):
        hidden = f"{_count(nvidia.gpus)} of this machine" if nvidia.gpus else "this machine's GPUs"
        cure = f"unset {HIDDEN}, or set it to the numbers of GPUs that nvidia-smi lists, such as {HIDDEN}=0"
        if "did not" in text or "too old" in text:
            return fault("CUDA", f"{HIDDEN}={visible!r}, and {shortened(text, most=200)}", cure)
        return fault("CUDA", f"{HIDDEN}={visible!r} hides {hidden} from torch", cure)
    if "too old" in text or "insufficient" in text:
        driver = nvidia.driver or "not known"
        cure = f"Update NVIDIA's driver, or take a torch for CUDA {nvidia.cuda or 'of that driver'}: {BUILD}"
        return fault("CUDA", f"torch is built for CUDA {facts['cuda']}, and the driver, {driver}, is older", cure)
    if nvidia.gpus and nvidia.driver is None:
        cure = "Install NVIDIA's driver; in a container, start it with --gpus all and NVIDIA's container toolkit"
        return fault("CUDA", f"this machine has {_count(nvidia.gpus)}, and no driver can be asked", cure)
    if nvidia.gpus or nvidia.driver:
        cure = "See whether nvidia-smi works; after an update of the driver the machine must be started anew"
        return fault("CUDA", f"{_count(nvidia.gpus)}, driver {nvidia.driver}: {shortened(text, most=200)}", cure)
    built = facts["cuda"] or facts["hip"]
    words = f"built into torch ({built}), and no GPU or driver is in this machine: runs use the CPU"
    if visible is None:
        return note("CUDA", words)
    return note("CUDA", f"{words}; {HIDDEN}={visible!r} would hide one", f"unset {HIDDEN} where there is a GPU")


def group_findings(facts: Facts, trials: Mapping[str, Facts]) -> Iterator[Finding]:
    """Say whether ranks can talk to each other. trials: of `group:gloo` and `group:nccl`, where they were tried."""
    groups, gpus = facts["groups"], len(facts["gpus"])
    one = "strategy=single needs none"
    if not groups["distributed"]:
        cure = f"Of several ranks nothing works: install an official build, {AGAIN}. {one}"
        yield fault("gloo", "torch was built without torch.distributed", cure)
        return
    if not groups["gloo"]:
        cure = f"Ranks on a CPU need it, and checkpoints of GPUs' ranks: install an official build, {AGAIN}. {one}"
        yield fault("gloo", "torch was built without it", cure)
    else:
        cure = "Bring up the loopback interface (ip link set lo up), and see that this host's name resolves: /etc/hosts"
        yield _group("gloo", trials["group:gloo"], cure)
    if groups["nccl"]:
        version = groups["nccl_version"] or ""
        if "group:nccl" in trials:
            cure = "Run again with NCCL_DEBUG=INFO, which says what it looks for; launch.backend=gloo goes without it"
            yield _group("NCCL", trials["group:nccl"], cure, version)
        else:
            yield ok("NCCL", f"{version} built in, and no GPU to use it".strip())
    elif gpus > 1:
        cure = f"launch.backend=gloo is slower; or {BUILD}"
        yield fault("NCCL", f"torch was built without it, and has {_count(gpus)}", cure)
    else:
        yield ok("NCCL", "not built in; of several GPUs alone it would be used")


def _group(name: str, trial: Facts, cure: str, version: str = "") -> Finding:
    if trial.get("sum") == 4.0:
        return ok(name, " ".join(filter(None, [version, "a process group of one rank works"])))
    return fault(name, f"a process group of one rank fails: {_failure(trial)}", cure)


def run_findings(trials: Mapping[str, Facts]) -> Iterator[Finding]:
    """Say which precisions train on which device. trials: by `run:DEVICE:WORD`."""
    devices: dict[str, dict[str, Facts]] = {}
    for what, trial in trials.items():
        if what.startswith("run:"):
            _, device, word = what.split(":")
            devices.setdefault(device, {})[word] = trial
    for device, by_word in devices.items():
        base = by_word.get("fp32", {}).get("loss")
        good = [word for word, trial in by_word.items() if "loss" in trial and not _is_apart(trial["loss"], base)]
        if good:
            seconds = sum(by_word[word]["seconds"] for word in good)
            yield ok(f"runs on {device}", f"{', '.join(good)}: three steps each, {seconds:.1f} s")
        for word, trial in by_word.items():
            part = f"{word} on {device}"
            if "refused" in trial:
                yield note(part, shortened(trial["refused"], most=200))
            elif "loss" not in trial:
                other = f"precision={good[0]} works there" if good else AGAIN
                yield fault(
                    part, f"a run of three steps fails: {_failure(trial)}", f"{other}. Report it with this line"
                )
            elif word not in good:
                words = f"after three steps the loss is {trial['loss']:.4g}, and {base:.4g} in fp32"
                yield fault(part, words, f"Its kernels give wrong numbers: {AGAIN}")


def _is_apart(loss: float, base: float | None) -> bool:
    return base is not None and abs(loss - base) > MOST_APART


def import_findings(trials: Mapping[str, Facts], names: Mapping[str, str]) -> Iterator[Finding]:
    """Say which packages cannot be imported. names: the distribution of each module."""
    good = []
    for module, distribution in names.items():
        trial = trials[f"import:{module}"]
        if "version" in trial:
            good.append(module)
            continue
        cure = f"pip install --force-reinstall --no-deps {distribution}"
        if module == "torchvision":
            cure = "Its build must be torch's own, such as +cpu for +cpu: install both from one place, or uninstall it"
        yield fault(distribution, f"importing {module} fails: {_failure(trial)}", cure)
    if good:
        yield ok("imports", ", ".join(good))


def _failure(trial: Facts) -> str:
    if "died" in trial:
        return str(trial["died"])
    error = trial.get("error", {"type": "", "text": f"it gave {trial.get('sum')}"})
    return shortened(f"{error['type']}: {error['text']}".removeprefix(": "), most=200)


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus != 1 else ''}"
