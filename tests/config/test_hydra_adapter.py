"""What is relied upon of Hydra's private parts. Seen: Hydra 1.3.8. A failure here after an update names the part."""

import warnings

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

from exp.config.hydra_adapter import (
    BoundedFileSource,
    Loader,
    hydra_base,
    hydra_config,
    parse_override,
    registered_targets,
)
from exp.config.search_path import OWN_CONF, Place, search_places
from exp.errors import ConfigError


@pytest.fixture
def loader(tmp_path, monkeypatch) -> Loader:
    monkeypatch.chdir(tmp_path)
    return Loader(search_places())


def test_the_version_seen():
    assert hydra.__version__.startswith("1.3."), "read hydra_adapter.py again, then change this line"


def test_files_are_read_by_our_source_after_a_composition_too(loader, tmp_path):
    assert [type(source) for source in loader.get_sources() if source.scheme() == "file"] == [BoundedFileSource]
    (tmp_path / "extra" / "optimizer").mkdir(parents=True)
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    (tmp_path / "extra" / "optimizer" / "bomb.yaml").write_text(bomb)
    search = f"hydra.searchpath=[file://{tmp_path}/extra]"
    with pytest.raises(ConfigError, match="nodes"):
        loader.compose(config_name="train", overrides=["optimizer=bomb", search])


def test_the_layers_of_a_composition_are_its_files_in_the_order_of_merging(loader):
    loader.compose(config_name="train", overrides=["optimizer=sgd"])
    paths = [layer.config_path for layer in loader.layers]
    assert paths[0] == "hydra/config" or "hydra" in paths[0]
    assert paths.index("train") < paths.index("optimizer/sgd")
    assert next(layer for layer in loader.layers if layer.config_path == "optimizer/sgd").package == "optimizer"
    assert all(layer.file.is_file() for layer in loader.layers if layer.file)


def test_the_methods_that_are_replaced_are_there():
    assert callable(ConfigLoaderImpl._compose_config_from_defaults_list)
    assert callable(ConfigLoaderImpl._parse_overrides_and_create_caching_repo)
    assert callable(ConfigLoaderImpl._apply_overrides_to_config)
    assert callable(ConfigLoaderImpl.load_configuration)
    assert callable(ConfigRepository.initialize_sources)


def test_in_the_last_place_of_the_defaults_list_hydra_itself_takes_both_signs_for_one(loader):
    """So the rewriting of + to = changes nothing for precision, which stands last; it does for the axes before it."""
    configs = [loader.compose(config_name="train", overrides=[f"{sign}precision=bf16"]) for sign in ("", "+")]
    plain = [OmegaConf.to_container(config, resolve=False, throw_on_missing=False) for config in configs]
    for config in plain:
        del config["hydra"]
    assert plain[0] == plain[1]
    assert plain[0]["precision"]["word"] == "bf16"


def test_hydra_ignores_a_plus_beside_an_equal_sign(loader):
    """Why the two are joined before Hydra sees them."""
    config = loader.compose(config_name="train", overrides=["hooks=[memory]", "+hooks=throughput"])
    assert list(config.hooks) == ["memory"]


def test_hydra_takes_one_plus_a_group(loader):
    with pytest.raises(ConfigCompositionException):
        loader.compose(config_name="train", overrides=["+callbacks=ema", "+callbacks=early_stopping"])


def test_a_parsed_override_tells_its_sign_key_and_value():
    line = parse_override("++optimizer.lr=1e-3")
    assert (line.type.value, line.key_or_group, line.value(), line.package) == (3, "optimizer.lr", 1e-3, None)
    assert [parse_override(text).type.value for text in ("a=1", "+a=1", "~a")] == [1, 2, 4]
    assert parse_override("a=1,2").is_sweep_override()


def test_what_is_global_in_hydra_is_put_back(loader):
    config = loader.compose(config_name="train", overrides=[])
    with hydra_base(), hydra_config(config):
        assert HydraConfig.get().job.config_name == "train"
    assert not HydraConfig.initialized()


def test_plugins_bring_their_targets_with_them():
    found = registered_targets()
    assert "hydra_plugins.exp.launcher.ExpLauncher" in found
    assert "hydra._internal.core_plugins.basic_sweeper.BasicSweeper" in found
    assert "os.system" not in found


def test_the_parser_calls_functions_by_a_table_of_their_names():
    """So that `int` is one that takes no fraction: Hydra's own makes 16 of 16.5 in silence (1.3.8)."""
    assert OverridesParser.create().parse_override("seed=int(16.5)").value() == 16
    with pytest.raises(HydraException, match=r"16\.5 is no whole number"):
        parse_override("seed=int(16.5)")
    assert parse_override("seed=int('16')").value() == 16
    assert parse_override("seed=int(value=2.0)").value() == 2


def test_hydras_own_warnings_become_faults_and_no_others(loader, tmp_path):
    with pytest.raises(ConfigError, match="not available"):
        loader.compose(config_name="train", overrides=["hydra.searchpath=[file:///nowhere/at/all]"])
    with warnings.catch_warnings(record=True):
        loader.compose(config_name="train", overrides=[])


def test_a_place_behind_another_does_not_hide_it(tmp_path):
    (tmp_path / "late" / "optimizer").mkdir(parents=True)
    (tmp_path / "late" / "optimizer" / "adamw.yaml").write_text("lr: 9\n")
    places = [Place(provider="main", directory=OWN_CONF), Place(provider="late", directory=tmp_path / "late")]
    assert Loader(places).compose(config_name="train", overrides=[]).optimizer.lr != 9


def test_run_modes_are_the_two_known():
    assert {mode.name for mode in RunMode} == {"RUN", "MULTIRUN"}


BROKEN = {
    "raise ValueError('no')": "ValueError: no",
    "def f(:": "SyntaxError: invalid syntax",
    "import sys; sys.exit(3)": "SystemExit: 3",
    "from hydra.core.config_store import ConfigStore\nConfigStore.instance().store(name='bad', node=3)": "int",
}


@pytest.mark.parametrize(("code", "message"), BROKEN.items())
def test_a_plug_in_that_cannot_be_imported_is_a_fault_of_its_file(code, message, tmp_path, commands):
    """It is Hydra that imports all of them, whatever is asked, and lets all but an ImportError through."""
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


def test_a_file_is_read_again_when_it_has_changed_and_a_composition_changes_nothing_for_the_next(tmp_path, loader):
    own = tmp_path / "conf" / "optimizer"
    own.mkdir(parents=True)
    loader = Loader(search_places())

    def composed(*overrides):
        return OmegaConf.to_container(loader.compose(config_name="train", overrides=overrides).optimizer)

    known = composed("optimizer=sgd")
    changed = composed("optimizer=sgd", "optimizer.momentum=0.25")
    assert composed("optimizer=sgd") == known != changed
    for value in (1.5, 2.25):  # texts of other lengths: the clock of a file system may be coarse
        (own / "sgd.yaml").write_text(f"_target_: torch.optim.SGD\nlr: {value}\n")
        found = composed("optimizer=sgd")
        assert (found["lr"], "momentum" in found) == (value, False)
    (own / "sgd.yaml").unlink()
    assert composed("optimizer=sgd") == known
