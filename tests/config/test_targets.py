"""The wall that every `_target_` passes."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exp.config.targets import FUNCTIONS, LISTED, LISTED_CLASSES, TargetError, resolve

# Name, and the module that a wall with a hole would import; None where it is loaded anyway.
ATTACKS = [
    ("builtins.open", None),
    ("builtins.eval", None),
    ("builtins.getattr", None),
    ("builtins.__import__", None),
    ("os.system", None),
    ("posix.system", None),
    ("logging.os.system", None),
    ("subprocess.Popen", None),
    ("functools.partial", None),
    ("operator.attrgetter", None),
    ("torch.load", "torch"),
    ("torch.hub.load", "torch"),
    ("torch.jit.load", "torch"),
    ("torch.serialization.load", "torch"),
    ("torch.utils.cpp_extension.load", "torch"),
    ("torch.package.PackageImporter", "torch"),
    ("torch.multiprocessing.Process", "torch"),
    ("torch.utils.data.datapipes.iter.FileOpener", "torch"),
    ("numpy.load", "numpy"),
    ("joblib.load", "joblib"),
    ("pickle.Unpickler", None),
    ("urllib.request.urlopen", "urllib.request"),
    ("hydra.utils.get_method", "hydra"),
    ("hydra.utils.instantiate", "hydra"),
    ("lightning.pytorch.utilities.model_helpers.is_overridden", "lightning"),
    ("lightning.fabric.utilities.cloud_io._load", "lightning"),
    ("exp.run.fit", "exp.run"),
    ("exp.config.targets.resolve", None),
    ("antigravity.webbrowser", "antigravity"),
]
# These pass the name and must be stopped by what they lead to.
RE_EXPORTS = [
    "torch.nn.functional.handle_torch_function",
    "torch.nn.functional.importlib.import_module",
    "torch.nn.modules.module.warnings.warn",
    "torch.nn.modules.module.OrderedDict",
    "torch.nn.init.torch.load",
    "torch.nn.torch.load",
    "torch.nn.parallel.distributed.torch",
    "torch.optim.lr_scheduler.partial",
    "torch.optim.lr_scheduler.Counter",
    "torch.optim.optimizer.torch",
    "torchmetrics.utilities.data.dim_zero_cat",
    "torchmetrics.metric.inspect",
    "torchmetrics.metric.deepcopy",
    "lightning.pytorch.callbacks.model_checkpoint.Path",
    "lightning.pytorch.callbacks.lambda_function.Callable",
    "lightning.pytorch.loggers.csv_logs.os",
    "exp.data.text.Path",
    "exp.hooks.hook.dataclass",
    "exp.optim.parameter_groups.fnmatchcase",
]


@pytest.mark.parametrize("name", [name for name, _ in ATTACKS])
def test_an_attack_is_refused(name):
    with pytest.raises(TargetError) as caught:
        resolve(name)
    (fault,) = caught.value.faults
    assert name in fault.got
    assert "Traceback" not in str(caught.value)


def test_attacks_are_refused_without_importing_what_they_name():
    program = textwrap.dedent(
        """
        import json, sys
        from exp.config.targets import TargetError, resolve
        attacks = json.loads(sys.argv[1])
        before = set(sys.modules)
        for name, _ in attacks:
            try:
                resolve(name)
            except TargetError:
                continue
            raise SystemExit(f"{name} passed")
        new = set(sys.modules) - before
        print(json.dumps(sorted(new & {module for _, module in attacks if module})))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(ATTACKS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("name", RE_EXPORTS)
def test_what_an_allowed_module_imports_is_refused(name):
    with pytest.raises(TargetError):
        resolve(name)


@pytest.mark.parametrize("name", [
    "torch.nn.Linear", "torch.nn.modules.linear.Linear", "torch.optim.AdamW", "torch.optim.lr_scheduler.StepLR",
    "torchmetrics.Accuracy", "torchmetrics.classification.MulticlassAccuracy", "lightning.pytorch.Trainer",
    "lightning.pytorch.callbacks.EarlyStopping", "lightning.pytorch.loggers.CSVLogger", "torch.nn.functional.gelu",
    "torch.utils.data.ConcatDataset", "exp.hooks.gradients.Gradients",
])  # fmt: skip
def test_an_allowed_name_becomes_what_it_names(name):
    found = resolve(name)
    assert found.__name__ == name.rpartition(".")[2]


def test_every_listed_function_and_class_is_there():
    for name in [*FUNCTIONS, *LISTED_CLASSES]:
        assert callable(resolve(name)), name


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("torch.optim.SGD", "torch.nn.Module"),
        ("torch.nn.Linear", "torch.optim.Optimizer"),
        ("torch.nn.Linear", ["torchmetrics.Metric", "exp.hooks.hook.Hook"]),
        ("torch.nn.functional.gelu", "torch.nn.Module"),
    ],
)
def test_a_slot_takes_its_base_class_alone(name, base):
    with pytest.raises(TargetError, match="expected a subclass of"):
        resolve(name, base=base)


def test_an_abstract_class_is_refused_with_what_it_lacks():
    with pytest.raises(TargetError, match="abstract"):
        resolve("lightning.pytorch.loggers.Logger")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("torch.nn.Liner", "torch.nn.Linear"),
        ("torch.nn.linear", "torch.nn.Linear"),
        ("nn.Linear", "torch.nn.Linear"),
        ("optim.Adam", "torch.optim.Adam"),
        ("torch.optim.Adamw", "torch.optim.AdamW"),
        ("torch.optim.adm.Adam", "torch.optim.Adam"),
        ("torch.Linear", "torch.nn.Linear"),
        ("pytorch_lightning.callbacks.EarlyStopping", "lightning.pytorch.callbacks.EarlyStopping"),
        ("lightning.pytorch.callback.EarlyStopping", "lightning.pytorch.callbacks.EarlyStopping"),
        ("torchmetrics.Acuracy", "torchmetrics.Accuracy"),
        ("exp.hooks.gradient.Gradients", "exp.hooks.gradients.Gradients"),
    ],
)
def test_the_nearest_name_is_proposed(wrong, right):
    with pytest.raises(TargetError) as caught:
        resolve(wrong)
    assert f"Did you mean {right}?" in str(caught.value)


def test_a_function_is_refused_as_no_class():
    with pytest.raises(TargetError, match="a function; expected a class"):
        resolve("torch.nn.init.calculate_gain")


@given(st.text(max_size=40))
def test_any_text_is_refused_or_allowed_and_nothing_else_happens(text):
    with pytest.raises(TargetError):
        resolve(text)


@given(st.lists(st.sampled_from(["torch", "nn", "os", "system", "optim", "__class__", "_C", "modules", "exp", "data"]),
                min_size=1, max_size=5))  # fmt: skip
def test_names_made_of_likely_parts_are_classes_or_refused(parts):
    try:
        found = resolve(".".join(parts))
    except TargetError:
        return
    assert isinstance(found, type)


def test_listed_packages_hold_no_way_to_open_a_file():
    """The reason why torch.utils.data is listed class by class."""
    assert not any("datapipes" in name or name in ("torch", "torch.utils.data", "exp") for name in LISTED)


class TestOnesOwnModules:
    """What stands beside a user's own ./conf; the names of modules differ, for Python keeps what it has imported."""

    @pytest.fixture
    def home(self, tmp_path, monkeypatch):
        (tmp_path / "conf" / "model").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        return tmp_path

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def test_a_file_and_a_package_beside_conf_are_allowed(self, home):
        self.write(home / "ones_own_layers.py", "import torch\nclass Mine(torch.nn.Module): pass\n")
        self.write(home / "ones_own_package" / "__init__.py", "from ones_own_package.net import Net\n")
        self.write(home / "ones_own_package" / "net.py", "import torch\nclass Net(torch.nn.Module): pass\n")
        assert resolve("ones_own_layers.Mine", base="torch.nn.Module").__name__ == "Mine"
        assert resolve("ones_own_package.net.Net").__name__ == "Net"
        assert resolve("ones_own_package.Net") is resolve("ones_own_package.net.Net")

    def test_without_a_conf_beside_it_a_file_is_not(self, home):
        self.write(home / "stray_layers.py", "raise SystemExit('imported')\n")
        (home / "conf" / "model").rmdir()
        with pytest.raises(TargetError, match=r"let stray_layers\.py stand beside your own \./conf"):
            resolve("stray_layers.Mine")

    def test_a_file_named_like_the_standard_library_is_not(self, home):
        self.write(home / "subprocess.py", "raise SystemExit('imported')\n")
        with pytest.raises(TargetError, match="outside the allowed packages"):
            resolve("subprocess.Popen")

    def test_a_file_named_like_an_installed_package_is_not(self, home):
        self.write(home / "yaml.py", "raise SystemExit('imported')\n")
        with pytest.raises(TargetError, match="outside the allowed packages"):
            resolve("yaml.YAMLObject")

    def test_what_it_imports_from_elsewhere_is_not(self, home):
        self.write(
            home / "importing_layers.py", "from subprocess import Popen\nfrom torch.nn import Linear\nimport os\n"
        )
        with pytest.raises(TargetError, match=r"which is subprocess\.Popen"):
            resolve("importing_layers.Popen")
        with pytest.raises(TargetError, match=r"Write torch\.nn\.modules\.linear\.Linear"):
            resolve("importing_layers.Linear")
        with pytest.raises(TargetError, match=r"no module importing_layers\.os"):
            resolve("importing_layers.os.system")

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            ("broken_syntax", "class Net(:\n", "SyntaxError"),
            ("broken_import", "import not_installed_at_all\n", "No module named 'not_installed_at_all'"),
            ("broken_value", "1 / 0\n", "ZeroDivisionError"),
            ("broken_exit", "raise SystemExit(3)\n", "SystemExit"),
        ],
    )
    def test_a_module_that_cannot_be_imported_is_a_fault(self, home, name, text, said):
        self.write(home / f"{name}.py", text)
        with pytest.raises(TargetError, match=f"importing {name} failed with .*") as caught:
            resolve(f"{name}.Net")
        assert said in str(caught.value)

    def test_a_package_allowed_on_the_command_line(self):
        with pytest.raises(TargetError, match=r"add 'security\.allow=\[sklearn\]'"):
            resolve("sklearn.linear_model.LogisticRegression")
        assert resolve("sklearn.linear_model.LogisticRegression", allow=["sklearn"]).__name__ == "LogisticRegression"
        with pytest.raises(TargetError, match="a module; expected a class"):
            resolve("sklearn.base.np", allow=["sklearn.base"])
        with pytest.raises(TargetError, match=r"which is collections\.defaultdict"):
            resolve("sklearn.base.defaultdict", allow=["sklearn"])
