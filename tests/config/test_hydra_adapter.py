"""The private parts of Hydra 1.3.8 that exp uses. A failure after an update names the part."""

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

from exp.config.hydra_adapter import (
    BoundedFileSource,
    Loader,
    parse_override,
    registered_targets,
)
from exp.config.search_path import search_places
from exp.errors import ConfigError


@pytest.fixture
def loader(tmp_path, monkeypatch) -> Loader:
    monkeypatch.chdir(tmp_path)
    return Loader(search_places())


def test_files_of_a_search_path_have_bounded_size(loader, tmp_path):
    assert [type(source) for source in loader.get_sources() if source.scheme() == "file"] == [BoundedFileSource]
    (tmp_path / "extra" / "optimizer").mkdir(parents=True)
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    (tmp_path / "extra" / "optimizer" / "bomb.yaml").write_text(bomb)
    search = f"hydra.searchpath=[file://{tmp_path}/extra]"
    with pytest.raises(ConfigError, match="nodes"):
        loader.compose(config_name="train", overrides=["optimizer=bomb", search])


def test_layers_are_the_merged_files_in_order(loader):
    loader.compose(config_name="train", overrides=["optimizer=sgd"])
    paths = [layer.config_path for layer in loader.layers]
    assert paths[0] == "hydra/config" or "hydra" in paths[0]
    assert paths.index("train") < paths.index("optimizer/sgd")
    assert next(layer for layer in loader.layers if layer.config_path == "optimizer/sgd").package == "optimizer"
    assert all(layer.file.is_file() for layer in loader.layers if layer.file)


def test_the_replaced_methods_exist():
    assert hydra.__version__.startswith("1.3."), "read hydra_adapter.py again, then change this line"
    for name in ("_compose_config_from_defaults_list", "_parse_overrides_and_create_caching_repo",
                 "_apply_overrides_to_config", "load_configuration"):  # fmt: skip
        assert callable(getattr(ConfigLoaderImpl, name))
    assert callable(ConfigRepository.initialize_sources)
    assert {mode.name for mode in RunMode} == {"RUN", "MULTIRUN"}


def test_hydra_ignores_a_plus_after_an_equal_sign(loader):
    """exp joins both before Hydra sees them."""
    config = loader.compose(config_name="train", overrides=["hooks=[memory]", "+hooks=throughput"])
    assert list(config.hooks) == ["memory"]
    with pytest.raises(ConfigCompositionException):
        loader.compose(config_name="train", overrides=["+callbacks=ema", "+callbacks=early_stopping"])


def test_a_parsed_override_has_sign_key_and_value():
    line = parse_override("++optimizer.lr=1e-3")
    assert (line.type.value, line.key_or_group, line.value(), line.package) == (3, "optimizer.lr", 1e-3, None)
    assert [parse_override(text).type.value for text in ("a=1", "+a=1", "~a")] == [1, 2, 4]
    assert parse_override("a=1,2").is_sweep_override()


def test_targets_of_plugins_are_registered():
    found = registered_targets()
    assert "hydra_plugins.exp.launcher.ExpLauncher" in found
    assert "hydra._internal.core_plugins.basic_sweeper.BasicSweeper" in found
    assert "os.system" not in found


def test_int_in_an_override_takes_no_fraction():
    """Hydra 1.3.8 makes 16 of 16.5 without a warning."""
    assert OverridesParser.create().parse_override("seed=int(16.5)").value() == 16
    with pytest.raises(HydraException, match=r"16\.5 is no whole number"):
        parse_override("seed=int(16.5)")
    assert parse_override("seed=int('16')").value() == 16
    assert parse_override("seed=int(value=2.0)").value() == 2


def test_warnings_of_hydra_become_errors(loader):
    with pytest.raises(ConfigError, match="not available"):
        loader.compose(config_name="train", overrides=["hydra.searchpath=[file:///nowhere/at/all]"])


BROKEN = {
    "def f(:": "SyntaxError: invalid syntax",
    "import sys; sys.exit(3)": "SystemExit: 3",
    "from hydra.core.config_store import ConfigStore\nConfigStore.instance().store(name='bad', node=3)": "int",
}


@pytest.mark.parametrize(("code", "message"), BROKEN.items())
def test_a_broken_plugin_is_named(code, message, tmp_path, commands):
    """Hydra imports all plug-ins for any command and passes on all errors except ImportError."""
    package = tmp_path / "installed" / "hydra_plugins" / "broken"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(code + "\n")
    place = tmp_path / "place"
    place.mkdir()
    done = commands.run("--help", cwd=place, environment={"PYTHONPATH": str(tmp_path / "installed")})
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("  hydra_plugins: ")]
    assert message in line
    assert str(package / "plugin.py") in line
    assert "Traceback" not in done.stderr


def test_a_changed_file_is_reread(tmp_path, loader):
    own = tmp_path / "conf" / "optimizer"
    own.mkdir(parents=True)
    loader = Loader(search_places())

    def composed(*overrides):
        return OmegaConf.to_container(loader.compose(config_name="train", overrides=overrides).optimizer)

    known = composed("optimizer=sgd")
    changed = composed("optimizer=sgd", "optimizer.momentum=0.25")
    assert composed("optimizer=sgd") == known != changed
    for value in (1.5, 2.25):  # the lengths differ, because timestamps may be coarse
        (own / "sgd.yaml").write_text(f"_target_: torch.optim.SGD\nlr: {value}\n")
        found = composed("optimizer=sgd")
        assert (found["lr"], "momentum" in found) == (value, False)
    (own / "sgd.yaml").unlink()
    assert composed("optimizer=sgd") == known
