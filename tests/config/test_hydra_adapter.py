"""Assumptions about Hydra: composition with its public API, and the grammar of overrides."""

import pytest
from omegaconf import OmegaConf

from exp.config.grammar import parse_override
from exp.config.hydra_adapter import compose_groups, registered_targets
from exp.config.search_path import search_places
from exp.errors import ConfigError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def composed(*overrides):
    return compose_groups(search_places(), config_name="train", overrides=overrides)


def test_layers_are_the_merged_files_in_order():
    _, layers = composed("optimizer=sgd")
    paths = [layer.config_path for layer in layers]
    assert "hydra" in paths[0]
    assert paths.index("train") < paths.index("optimizer/sgd")
    assert next(layer for layer in layers if layer.config_path == "optimizer/sgd").package == "optimizer"
    assert all(layer.file.is_file() for layer in layers if layer.file)


def test_hydra_ignores_a_plus_after_an_equal_sign():
    """exp joins the two words before it passes them to Hydra."""
    config, _ = composed("hooks=[memory]", "+hooks=throughput")
    assert list(config.hooks) == ["memory"]
    with pytest.raises(ConfigError):
        composed("+callbacks=ema", "+callbacks=early_stopping")


def test_a_parsed_override_has_sign_key_and_value():
    line = parse_override("++optimizer.lr=1e-3")
    assert (line.type.value, line.key_or_group, line.value(), line.package) == (3, "optimizer.lr", 1e-3, None)
    assert [parse_override(text).type.value for text in ("a=1", "+a=1", "~a")] == [1, 2, 4]
    assert parse_override("a=1,2").is_sweep_override()


def test_targets_of_plugins_are_registered():
    composed()
    found = registered_targets()
    assert "hydra_plugins.exp.launcher.ExpLauncher" in found
    assert "hydra._internal.core_plugins.basic_sweeper.BasicSweeper" in found
    assert "os.system" not in found


BROKEN = {
    "def f(:": "SyntaxError: invalid syntax",
    "import sys; sys.exit(3)": "SystemExit: 3",
    "from hydra.core.config_store import ConfigStore\nConfigStore.instance().store(name='bad', node=3)": "int",
}


@pytest.mark.parametrize(("code", "message"), BROKEN.items())
def test_a_broken_plugin_is_named(code, message, tmp_path, commands):
    """Hydra imports all plug-ins for any command, and raises all of their errors except ImportError."""
    package = tmp_path / "installed" / "hydra_plugins" / "broken"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(code + "\n")
    place = tmp_path / "place"
    place.mkdir()
    done = commands.run("--cfg", "job", cwd=place, environment={"PYTHONPATH": str(tmp_path / "installed")})
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("  hydra_plugins: ")]
    assert message in line
    assert str(package / "plugin.py") in line
    assert "Traceback" not in done.stderr


def test_a_changed_file_is_reread(tmp_path):
    own = tmp_path / "conf" / "optimizer"
    own.mkdir(parents=True)

    def optimizer():
        return OmegaConf.to_container(composed("optimizer=sgd")[0].optimizer)

    known = optimizer()
    assert optimizer() == known
    for value in (1.5, 2.25):  # the texts have different lengths, because two files may have the same timestamp
        (own / "sgd.yaml").write_text(f"_target_: torch.optim.SGD\nlr: {value}\n")
        found = optimizer()
        assert (found["lr"], "momentum" in found) == (value, False)
    (own / "sgd.yaml").unlink()
    assert optimizer() == known
