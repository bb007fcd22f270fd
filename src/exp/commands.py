"""The table of exp's commands: the module of each, what it does in a line, and the words that it takes.

It is read at every start and at every key of a completion, so it imports next to nothing.
"""

from __future__ import annotations

from typing import NamedTuple

# What stands for any file or folder among the words of a flag or a key.
PATH = "path"
ALLOW = "--allow="
SWITCH = "true|false"
OF_A_RUN = {"run": PATH, "weights": "best|last|path"}
EXPORTED = {**OF_A_RUN, "averaged": SWITCH, "preprocessing": SWITCH, "quantize": "int8", "security.allow": ""}
# Hydra's, of a command that takes overrides.
HYDRA_FLAGS = (
    "--multirun", "--cfg=job|hydra|all", "--package=", "--resolve", "--config-name=", "--config-dir=path",
    "--info=defaults-tree|defaults|searchpath|plugins|config|all", "--hydra-help", "--help", "--version",
)  # fmt: skip


class Command(NamedTuple):
    """A command of exp: `exp NAME ...`, which is `python -m MODULE ...`.

    has_overrides: whether it takes overrides of a config. flags: of its own; with a = where a value follows, and behind
    it the words that this may be, A|B. keys: of its own, key=value, each with such words. words: what may stand alone.
    """

    module: str
    help: str
    has_overrides: bool = False
    flags: tuple[str, ...] = ()
    keys: dict[str, str] = {}
    words: str = ""


def _of_config(module: str, help: str, *flags: str, words: str = "", **keys: str) -> Command:
    return Command(module, help, True, flags, keys, words)


def _tool(module: str, help: str, *flags: str, words: str = "") -> Command:
    return Command(module, help, False, flags, {}, words)


# In the order of --help, by what a person is about to do.
SECTIONS: dict[str, dict[str, Command]] = {
    "Train": {
        "train": _of_config("exp.train", "one run, or with -m a sweep"),
        "resume": _of_config("exp.resume", "go on with a run", "--verify", ALLOW, words=PATH),
        "fork": _of_config("exp.fork", "begin a run where another one, RUN@STEP, was at a step", words=PATH),
    },
    "Before a run": {
        "check": _of_config("exp.check", "what is wrong with a config; train nothing"),
        "plan": _of_config("exp.plan", "what a run takes: layers, memory of each rank, time of a step", device="",
                           memory="", format="text|json", savings=SWITCH, search=SWITCH),
        "data": _of_config("exp.data", "look at the data: figures, leaks, pictures", "--samples=all"),
        "find_lr": _of_config("exp.find_lr", "a learning rate, by a range test", "--min=", "--max=", "--steps=",
                              "--stop-factor="),
        "find_batch": _of_config("exp.find_batch", "the largest batch that fits into memory, and the fastest",
                                 "--memory=", "--max=", "--steps="),
        "why": _of_config("exp.why", "which file, group or override gave a key its value", run=PATH),
        "gallery": _tool("exp.gallery", "the experiments that come with exp", words="experiment"),
    },
    "After a run": {
        "dashboard": _tool("exp.dashboard", "TensorBoard for outputs/, a sweep or a run",
                           "--page=scalars|custom_scalars|hparams|images|pr_curves|histograms|text|graphs", "--port=",
                           "--host=", "--no-browser", words=PATH),
        "report": _tool("exp.report", "compare runs and sweeps in one HTML page", "--output=path", "--repeat-over=",
                        "--metric=", "--watch", words=PATH),
        "diff": _tool("exp.diff", "what two runs have of different config, code and results", "--all", words=PATH),
        "evaluate": Command("exp.evaluate", "evaluate what a run saved", True, (),
                            {**OF_A_RUN, "stage": "test|val|all"}),
        "predict": Command("exp.predict", "what a trained network says of new samples", True, (),
                           {**OF_A_RUN, "input": PATH, "output": PATH}),
        "export": Command("exp.export", "a saved network for other programs, such as ONNX", False, (),
                          {**EXPORTED, "format": "onnx|torch_export|state_dict|safetensors", "output": PATH,
                           "dynamic": ""}),
        "serve": Command("exp.serve", "a saved network over HTTP, on this machine", False, (),
                         {**EXPORTED, "model": PATH, "host": "", "port": "", "batch": "", "wait_ms": "", "queue": "",
                          "samples": "", "body_mib": ""}),
    },
    "Tools": {
        "doctor": _tool("exp.doctor", "what the installation and the machine can do", "--quick", "--outputs=path"),
        "audit": _tool("exp.audit", "what a config or a checkpoint from elsewhere would do", "--json", ALLOW,
                       words=PATH),
        "gradcheck": _tool("exp.gradcheck", "whether a backward of your own is the derivative of its forward",
                           "--input=", ALLOW, "--seed="),
        "schema": _tool("exp.schema", "JSON schemas, by which an editor completes YAML", "--modelines", ALLOW),
        "completion": _tool("exp.completion", "tab completion for bash and zsh", words="bash|zsh"),
        "worker": _tool("exp.worker", "one rank of a frozen run, for torchrun and SLURM", "--resume=path", ALLOW,
                        "--requeues=", words=PATH),
    },
}  # fmt: skip
COMMANDS: dict[str, Command] = {name: command for named in SECTIONS.values() for name, command in named.items()}
