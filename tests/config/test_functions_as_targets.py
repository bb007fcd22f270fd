"""A `_target_` that is a function, a class method or a lazy import, and the conversion of its values."""

import sys

import pytest
import torch
from omegaconf import OmegaConf

import exp
from exp.check.examination import plan
from exp.check.parameters import node_errors
from exp.check.resolution import resolve as resolve_config
from exp.config.targets import TargetError, resolve
from exp.construct import construct
from exp.errors import ConfigError

MAKERS = """
import functools
from subprocess import check_output

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import TensorDataset


def net(width=7, **more):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(width), nn.ReLU(), nn.Linear(width, 10))


def says_module(width: int = 7) -> "nn.Module":
    return net(width)


def says_nothing(path: str) -> None:
    raise SystemExit("called")


def wrong(width: int = 3):
    return {"width": width}


def pairs(samples: int = 40):
    return TensorDataset(torch.randn(samples, 4), torch.arange(samples) % 3)


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x.flatten(1))

    @classmethod
    def from_width(cls, width: int, **more):
        return cls(width)

    def method(self):
        return self


class Typed(nn.Module):
    def __init__(self, weight: "torch.Tensor | None" = None, dtype: torch.dtype = torch.float32, other=None):
        super().__init__()
        self.weight, self.dtype, self.other = weight, dtype, other


def passes_more(init):
    @functools.wraps(init)
    def wrapped(self, *args, **kwargs):
        self.more = {name: kwargs.pop(name) for name in list(kwargs) if name != "width"}
        init(self, *args, **kwargs)
    return wrapped


class Wrapped(nn.Module):
    @passes_more
    def __init__(self, width: int = 3):
        super().__init__()


class Lit(LightningModule):
    def __init__(self, width: int = 3):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def training_step(self, batch, index):
        return self.layer(batch).sum()


def lit():
    return Lit()


cached = functools.lru_cache(net)
"""
LATE = """
import importlib


def __getattr__(name):
    if name == "Late":
        return importlib.import_module("late_package.parts").Late
    if name == "Popen":
        import subprocess
        return subprocess.Popen
    if name == "Broken":
        raise ImportError("no backend")
    raise AttributeError(name)


def __dir__():
    return ["Late"]
"""
MODULE = ("torch.nn.Module",)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "makers.py").write_text(MAKERS)
    (tmp_path / "late_package").mkdir()
    (tmp_path / "late_package" / "__init__.py").write_text(LATE)
    (tmp_path / "late_package" / "parts.py").write_text("import torch\nclass Late(torch.nn.Identity): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("makers", "late_package")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["net", "says_module", "Net.from_width"])
def test_a_user_function_may_return_a_module(name):
    assert callable(resolve(f"makers.{name}", base=MODULE, returns=MODULE))


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("check_output", "which is subprocess.check_output"),
        ("says_nothing", "a function that returns nothing; expected a function that returns a Module"),
        ("Net.method", "which is not a class method of makers.Net"),
        ("Net.from_widht", "Did you mean makers.Net.from_width"),
        ("says_modul", r"Did you mean makers.says_module\?"),
        ("cached", "a _lru_cache_wrapper; expected a class, or a function"),
    ],
)
def test_other_callables_are_refused(name, got):
    with pytest.raises(TargetError, match=got):
        resolve(f"makers.{name}", base=MODULE, returns=MODULE)


@pytest.mark.parametrize("name", [
    "torch.nn.functional.linear", "torch.nn.Embedding.from_pretrained", "exp.models.containers.with_forward",
])  # fmt: skip
def test_library_functions_are_allowed_by_name_only(name):
    with pytest.raises(TargetError):
        resolve(name, returns=MODULE)


def test_a_lazy_import_is_checked_by_its_module():
    assert resolve("late_package.Late", base="torch.nn.Module").__module__ == "late_package.parts"
    with pytest.raises(TargetError, match=r"which is subprocess\.Popen"):
        resolve("late_package.Popen")
    with pytest.raises(TargetError, match="failed with ImportError: no backend"):
        resolve("late_package.Broken")
    with pytest.raises(TargetError, match=r"Did you mean late_package\.Late\?"):
        resolve("late_package.Lat")


def test_a_returned_object_is_checked():
    with pytest.raises(ConfigError, match=r"model\._target_: makers\.wrong, which returned a builtins\.dict"):
        construct({"_target_": "makers.wrong"}, key="model", allow=())
    with pytest.raises(ConfigError, match=r"data\.dataset\._target_: makers\.net, which returned a torch"):
        construct({"_target_": "makers.net"}, key="data.dataset", allow=())
    assert len(construct({"_target_": "makers.pairs", "samples": 6}, key="data.dataset", allow=())) == 6


def checked(*overrides: str):
    return plan(resolve_config(exp.compose(["hydra.run.dir=run", *overrides])))


def test_functions_pass_the_check_in_all_slots(home):
    made = checked("model={_target_: makers.net, width: 9, anything: 3}").shapes
    assert made.parameters == 64 * 9 + 9 + 9 * 10 + 10
    (home / "conf/model/layered.yaml").write_text(
        "# Layers: model=layered\n_target_: exp.models.containers.SequentialModel\n"
        "layers: {body: {_target_: makers.Net.from_width, width: 3}}\n"
    )
    assert checked("model=layered").shapes.parameters == 650
    found = checked(
        "model={_target_: torch.nn.Linear, in_features: 4, out_features: 3}",
        "data={_target_: exp.data.data.Data, dataset: {_target_: makers.pairs}, num_classes: 3}",
    )
    assert found.spec.input_shape == (4,)
    assert found.plain["data"]["batch_size"] == 64


@pytest.mark.parametrize("node", ["makers.Lit", "makers.lit"])
def test_a_lightning_module_as_model_is_refused(node):
    fix = r"'module={_target_: makers\.Lit}'.*name the class of the network"
    with pytest.raises(ConfigError, match=f"model._target_: {node}, a LightningModule.*{fix}"):
        checked(f"model={{_target_: {node}}}")


def test_a_typed_node_replaces_the_chosen_option(home):
    config = exp.compose(["hydra.run.dir=run", "model={_target_: makers.Net, width: 3}"])
    assert OmegaConf.to_container(config.model) == {"_target_": "makers.Net", "width": 3}
    config = exp.compose(["hydra.run.dir=run", "model=mlp", "model={_target_: makers.Net}", "model.width=4"])
    assert OmegaConf.to_container(config.model) == {"_target_": "makers.Net", "width": 4}
    # The keys that exp reads stay, and the parameters of the replaced class are removed.
    config = exp.compose(["hydra.run.dir=run", "optimizer={_target_: torch.optim.SGD, lr: 0.1}"])
    assert OmegaConf.to_container(config.optimizer) == {
        "groups": {}, "exempt_from_decay": [], "_target_": "torch.optim.SGD", "lr": 0.1,
    }  # fmt: skip
    # A replaced layer keeps its position.
    before = list(exp.compose(["hydra.run.dir=run"]).model.layers)
    config = exp.compose(["hydra.run.dir=run", f"model.layers.{before[1]}={{_target_: torch.nn.Tanh}}"])
    assert list(config.model.layers) == before
    assert OmegaConf.to_container(config.model.layers[before[1]]) == {"_target_": "torch.nn.Tanh"}
    # A node without a `_target_` is merged.
    config = exp.compose(["hydra.run.dir=run", "optimizer={lr: 0.1}"])
    assert config.optimizer.lr == 0.1
    assert config.optimizer._target_ == "torch.optim.AdamW"


def errors(node, key="model.layers.x"):
    return [f"{error.key}: {error.got}; expected {error.expected}" for error in node_errors(key, node, allow=())]


def test_a_wrapped_constructor_takes_any_name():
    assert errors({"_target_": "makers.Wrapped", "num_labels": 3}) == []
    made = construct({"_target_": "makers.Wrapped", "num_labels": 3}, key="model", allow=())
    assert made.more == {"num_labels": 3}
    # Wrappers of libraries have the parameters of the wrapped class.
    assert errors({"_target_": "lightning.pytorch.Trainer", "max_epoch": 3}, key="trainer") != []


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"weight": [0.25, 0.5]}, "weight", torch.tensor([0.25, 0.5])),
        ({"weight": [[1, 2], [3, 4]]}, "weight", torch.tensor([[1, 2], [3, 4]])),
        ({"weight": None}, "weight", None),
        ({"dtype": "torch.float64"}, "dtype", torch.float64),
        ({"other": "float64"}, "other", "float64"),
        ({"other": [0.5]}, "other", [0.5]),
    ],
)
def test_values_become_tensors_and_dtypes_by_annotation(given, name, expected):
    node = {"_target_": "makers.Typed", **given}
    assert errors(node) == []
    found = getattr(construct(node, key="model", allow=()), name)
    assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected
    assert not isinstance(expected, torch.Tensor) or found.dtype == expected.dtype


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weight": "heavy"}, "expected numbers, or lists of them, or null"),
        ({"dtype": "torch.float65"}, "expected a dtype, such as torch.float64"),
    ],
)
def test_a_wrong_tensor_or_dtype_is_an_error(given, said):
    (error,) = errors({"_target_": "makers.Typed", **given})
    assert said in error


def test_a_loss_of_torch_gets_a_tensor():
    loss = construct({"_target_": "torch.nn.CrossEntropyLoss", "weight": [1, 3]}, key="objective.a", allow=())
    assert loss.weight.tolist() == [1.0, 3.0]
    assert loss.weight.dtype == torch.float32
