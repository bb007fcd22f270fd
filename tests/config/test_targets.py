"""The allow list for every `_target_`."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exp.config.targets import FUNCTIONS, LISTED_CLASSES, TargetError, resolve

# Forbidden name, and the module that must not be imported for it; None if the module is always loaded.
ATTACKS = [
    ("builtins.eval", None),
    ("os.system", None),
    ("subprocess.Popen", None),
    ("functools.partial", None),
    ("torch.load", "torch"),
    ("torch.utils.cpp_extension.load", "torch"),
    ("torch.utils.data.datapipes.iter.FileOpener", "torch"),
    ("pickle.Unpickler", None),
    ("lightning.fabric.utilities.cloud_io._load", "lightning"),
    ("exp.run.fit", "exp.run"),
    ("antigravity.webbrowser", "antigravity"),
]
# Names in allowed modules that refer to other modules.
RE_EXPORTS = [
    "torch.nn.functional.importlib.import_module",
    "torch.nn.modules.module.warnings.warn",
    "torch.nn.init.torch.load",
    "torch.nn.parallel.distributed.torch",
    "torchmetrics.metric.deepcopy",
    "lightning.pytorch.callbacks.model_checkpoint.Path",
    "exp.optim.parameter_groups.fnmatchcase",
]


def test_an_attack_is_refused_without_an_import():
    program = textwrap.dedent(
        """
        import json, sys
        from exp.config.targets import TargetError, resolve
        attacks = json.loads(sys.argv[1])
        before = set(sys.modules)
        for name, _ in attacks:
            try:
                resolve(name)
            except TargetError as error:
                assert name in error.errors[0].got
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
def test_an_import_of_an_allowed_module_is_refused(name):
    with pytest.raises(TargetError):
        resolve(name)


def test_every_listed_name_resolves():
    for name in [*FUNCTIONS, *LISTED_CLASSES, "torch.nn.modules.linear.Linear", "torch.optim.lr_scheduler.StepLR",
                 "torchmetrics.Accuracy", "lightning.pytorch.Trainer", "exp.hooks.gradients.Gradients"]:  # fmt: skip
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
def test_a_slot_takes_subclasses_of_its_base(name, base):
    with pytest.raises(TargetError, match="expected a subclass of"):
        resolve(name, base=base)


def test_abstract_classes_and_functions_are_refused():
    with pytest.raises(TargetError, match="abstract"):
        resolve("lightning.pytorch.loggers.Logger")
    with pytest.raises(TargetError, match="a function; expected a class"):
        resolve("torch.nn.init.calculate_gain")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("torch.nn.linear", "torch.nn.Linear"),
        ("nn.Linear", "torch.nn.Linear"),
        ("torch.optim.adm.Adam", "torch.optim.adam.Adam"),
        ("torch.Linear", "torch.nn.Linear"),
        ("pytorch_lightning.callbacks.EarlyStopping", "lightning.pytorch.callbacks.EarlyStopping"),
    ],
)
def test_the_nearest_name_is_suggested(wrong, right):
    with pytest.raises(TargetError) as caught:
        resolve(wrong)
    assert f"Did you mean {right}?" in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_refused(text):
    with pytest.raises(TargetError):
        resolve(text)


@given(st.lists(st.sampled_from(["torch", "nn", "os", "system", "optim", "__class__", "_C", "modules", "exp", "data"]),
                min_size=1, max_size=5))  # fmt: skip
def test_random_names_are_classes_or_refused(parts):
    try:
        found = resolve(".".join(parts))
    except TargetError:
        return
    assert isinstance(found, type)


class TestUserModules:
    """Modules next to ./conf, with a new name in each test because Python caches imports."""

    @pytest.fixture
    def home(self, tmp_path, monkeypatch):
        (tmp_path / "conf" / "model").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        return tmp_path

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def test_modules_next_to_conf_are_allowed(self, home):
        self.write(home / "ones_own_layers.py", "import torch\nclass Mine(torch.nn.Module): pass\n")
        self.write(home / "ones_own_package" / "__init__.py", "from ones_own_package.net import Net\n")
        self.write(home / "ones_own_package" / "net.py", "import torch\nclass Net(torch.nn.Module): pass\n")
        assert resolve("ones_own_layers.Mine", base="torch.nn.Module").__name__ == "Mine"
        assert resolve("ones_own_package.net.Net").__name__ == "Net"
        assert resolve("ones_own_package.Net") is resolve("ones_own_package.net.Net")

    def test_without_a_conf_they_are_refused(self, home):
        self.write(home / "stray_layers.py", "raise SystemExit('imported')\n")
        (home / "conf" / "model").rmdir()
        with pytest.raises(TargetError, match=r"put stray_layers\.py next to your \./conf"):
            resolve("stray_layers.Mine")

    @pytest.mark.parametrize("name", ["subprocess.Popen", "yaml.YAMLObject"])
    def test_a_file_named_like_a_package_is_refused(self, home, name):
        self.write(home / f"{name.partition('.')[0]}.py", "raise SystemExit('imported')\n")
        with pytest.raises(TargetError, match="outside the allowed packages"):
            resolve(name)

    def test_their_imports_are_refused(self, home):
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
            ("broken_exit", "raise SystemExit(3)\n", "SystemExit"),
        ],
    )
    def test_a_broken_module_is_an_error(self, home, name, text, said):
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
