"""What a completion merges of the files has the keys that Hydra's composition has, or NeedsHydra is raised."""

import os
import random
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from exp.completion import Typed
from exp.config import search_path
from exp.config.group_kinds import AXIS, MANY
from exp.config.groups import open_search_path
from exp.config.hydra_adapter import HYDRA_ERRORS
from exp.config.merged_files import NeedsHydra, merged
from exp.config.overrides import checked_lines, diagnose, for_hydra
from exp.config.search_path import search_places
from exp.errors import ConfigError

# A share of what is typed at random; ATTACKS=2000 in the environment is as many lines.
LINES = int(os.environ.get("ATTACKS", "24"))
# Beside the choices of groups: right ones, and some that exp refuses.
SETTINGS = [
    *("~hooks.memory", "~optimizer.lr", "~model.layers.hidden", "+optimizer.own=3", "+vars.a.b=true", "++vars.k=[1,2]"),
    *("+model.layers.more=3", "+objective.new.weight=1", "++precision.keep.x=fp32", "++freeze.unfreeze.10=[a]"),
    *("optimizer._target_=torch.optim.SGD", "seed=4", "name=x", "test=false", "tags=[a,b]", "hydra.run.dir=x"),
    *("+trainer.gpus=2", "lr=3", "sede=3", "+seed=2", "trainer=3", "+scheduler.interval=epoch", "hydra/launcher=slurm"),
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def by_hydra(words: list[str], config_name: str, config_dir: str | None) -> dict[Any, Any]:
    loader, vocabulary = open_search_path(config_dir=config_dir, config_name=config_name, overrides=words)
    lines, _ = checked_lines(words, vocabulary, multirun=True)
    try:
        config = loader.compose(config_name=config_name, overrides=for_hydra(lines, vocabulary), multirun=True)
    except (ConfigError, *HYDRA_ERRORS):
        chosen = diagnose(loader, lines).config
        config = OmegaConf.create({}) if chosen is None else chosen
    plain = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    assert isinstance(plain, dict)
    plain.pop("hydra", None)
    return plain


def of_files(words: list[str], config_name: str = "train", config_dir: str | None = None) -> dict[Any, Any]:
    places = [str(place.directory) for place in search_places(config_dir=config_dir)]
    return merged(words, places=places, config_name=config_name)


def shape(value: Any, name: object = "") -> Any:
    """What a completion reads of a value: keys in their order, switches, targets."""
    if isinstance(value, dict):
        return [(str(key), shape(inner, key)) for key, inner in value.items()]
    return value if isinstance(value, bool) or name == "_target_" else None


def assert_same(*words: str, config_name: str = "train", config_dir: str | None = None) -> None:
    found = of_files([*words], config_name, config_dir)
    assert shape(found) == shape(by_hydra([*words], config_name, config_dir)), words


def lines(count: int) -> Iterator[list[str]]:
    draw, typed = random.Random(0), Typed.of([])
    groups = {group: typed.options(group, "") for group in typed.groups()}
    for _ in range(count):
        words = []
        for group in draw.sample(sorted(groups), draw.randint(1, 5)):
            option, sign = draw.choice(groups[group]), "+" if group in (*MANY, *AXIS) and draw.random() < 0.4 else ""
            some = draw.sample(groups[group], draw.randint(0, min(3, len(groups[group]))))
            is_list = group in MANY and draw.random() < 0.5
            words.append(f"{sign}{group}={'[' + ','.join(some) + ']' if is_list else option}")
        words += draw.sample(SETTINGS, draw.choice((0, 0, 1, 2)))
        draw.shuffle(words)
        yield words


def test_random_lines_have_the_keys_of_the_composed_config():
    """Those that Hydra is asked for are few."""
    asked = 0
    for words in lines(LINES):
        try:
            assert_same(*words)
        except NeedsHydra:
            asked += 1
    assert asked < LINES / 3


@pytest.mark.parametrize("group", ["experiment", "data", "model", "debug", "phases", "precision"])
def test_every_option_of_a_group_that_may_choose_of_others_is_merged(group):
    for option in Typed.of([]).options(group, ""):
        assert of_files([f"{group}={option}"])


def write(files: dict[str, str], root: str = "conf") -> None:
    """Write YAML files, each below a comment; a text behind ! belongs to the whole config."""
    for name, text in files.items():
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# @package _global_\n{text[1:]}" if text.startswith("!") else f"# Mine\n{text}")


OF_MODEL = "_target_: mine.Net\nwidth: 3\n"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        # An option of one's own, the one of that name before exp's, and folders of more of them.
        ({"model/mine.yaml": OF_MODEL}, ["model=mine"]),
        ({"model/mlp.yaml": OF_MODEL}, ["model=mlp", "optimizer=sgd"]),
        ({"model/small/tiny.yaml": OF_MODEL}, ["model=small/tiny"]),
        ({"model/mine.yaml": f"{OF_MODEL}defaults: [small/part, /optimizer/sgd@inner, _self_]\n",
          "model/small/part.yaml": "depth: 1\n"}, ["model=mine"]),
        # One that changes another, before and behind its own values, at its own place and at another's.
        ({"model/mine.yaml": "defaults: [mlp, _self_]\nlayers: {hidden: null, more: {a: yes}}\n"}, ["model=mine"]),
        ({"model/mine.yaml": "defaults: [_self_, mlp]\nlayers: {hidden: null, more: {a: 1}}\n"}, ["model=mine"]),
        ({"model/mine.yaml": "defaults: [mlp@inner, mlp@_here_]\nown: 1\n"}, ["model=mine"]),
        ({"model/mine.yaml": "# @package vars.net\nown: 1\n"}, ["model=mine"]),
        # Experiments that choose, and one that another one changes.
        ({"experiment/mine.yaml": "!defaults: [{override /model: lenet}, {override /hooks: []}]\n"
          "own_key: {a: 1}\n"}, ["experiment=mine"]),
        ({"experiment/mine.yaml": "!defaults: [gpt, {override /model: lenet}]\nvars: {a: 1}\n"},
         ["+experiment=mine", "optimizer=sgd"]),
        ({"experiment/mine.yaml": "!defaults: [{override /model: lenet}]\n"}, ["experiment=mine", "model=mlp"]),
        ({"local/default.yaml": "!vars: {disk: /scratch}\ntrainer: {enable_progress_bar: off}\n"}, []),
        # Groups of many: an entry alone in a file, several in one, and such as have no name of their own.
        ({"hooks/mine.yaml": "_target_: mine.Hook\nevery: 2\n"}, ["+hooks=mine"]),
        ({"hooks/mine.yaml": "a: {_target_: mine.A}\nb: {_target_: mine.B}\n"}, ["hooks=[mine]", "~hooks.a"]),
        # A group of one's own, and primary configs.
        ({"model/mine.yaml": OF_MODEL, "recipe/fast.yaml": "a: {b: 1}\n"}, ["+recipe=fast", "model=mine"]),
        ({"train.yaml": "defaults: [{model: mlp}, {data: digits}, _self_]\nown: {a: true}\n"}, ["data=wine"]),
        # Values in the place of mappings, mappings in the place of values, and what is asked for.
        ({"model/mine.yaml": "defaults: [mlp, _self_]\nlayers: 3\n"}, ["model=mine"]),
        ({"model/mine.yaml": "_target_: {a: 1}\nlayers: ???\n7: {8: on}\n"}, ["model=mine"]),
    ],
)  # fmt: skip
def test_the_users_own_files_are_merged_as_hydra_does(files, words):
    write(files)
    assert_same(*words)


def test_another_primary_config_and_another_folder():
    write(
        {
            "model/mine.yaml": OF_MODEL,
            "own.yaml": "defaults: [train, {override /model: mine}, _self_]\nkey: {a: 1}\n",
        }
    )
    assert_same("optimizer=sgd", "+vars.b=1", "key.a=2", config_name="own")
    write({"model/far.yaml": OF_MODEL, "model/mine.yaml": "b: 1\n"}, root="more")
    assert_same("model=far", config_dir="more")
    assert_same("model=mine", config_dir="more")


def test_a_plug_in_by_its_entry_point(tmp_path, monkeypatch):
    write({"conf/model/theirs.yaml": OF_MODEL, "__init__.py": ""}, root="theirs_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("theirs", "theirs_package", search_path.ENTRY_POINTS)
    monkeypatch.setattr(search_path.importlib.metadata, "entry_points", lambda group: [point])
    assert_same("model=theirs")
    assert "width" in of_files(["model=theirs"])["model"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["model=nothing_like_it", "model={_target_: mine.Net}"]),
        ({}, ["name=${seed}"]),
        ({}, ["+model=mlp"]),
        ({}, ["model=[mlp,lenet]"]),
        ({}, ["model=null"]),
        ({}, ["+precision=bf16", "precision=fp16"]),
        ({}, ["trainer=3"]),
        ({}, ["hydra.searchpath=[more]"]),
        ({"model/mine.yaml": "a: &a {b: 1}\nc: *a\n"}, ["model=mine"]),
        ({"model/mine.yaml": "a: 1\na: 2\n"}, ["model=mine"]),
        ({"model/mine.yaml": "yes: 1\n"}, ["model=mine"]),
        ({"model/mine.yaml": "[: 1\n"}, ["model=mine"]),
        ({"model/mine.yaml": "- 1\n"}, ["model=mine"]),
        ({"model/mine.yaml": "defaults: [mine, _self_]\n"}, ["model=mine"]),
        ({"model/mine.yaml": "defaults: [nothing_like_it, _self_]\n"}, ["model=mine"]),
        ({"model/mine.yaml": "defaults: ['${seed}', _self_]\n"}, ["model=mine"]),
        ({"model/mine.yaml": "defaults: [{override /data: wine}]\n"}, ["model=mine"]),
        ({"model/mine.yaml": "defaults: [mlp, _self_]\nlayers: [1]\n"}, ["model=mine"]),
        ({"model/mine.yaml": "defaults: [a, _self_]\nb: {c: 1}\n", "model/a.yaml": "b: '${vars}'\n"}, ["model=mine"]),
        ({"train.yaml": "defaults: [{model: mlp}]\nown: 1\n", "model/a.yaml": OF_MODEL}, []),
    ],
)  # fmt: skip
def test_of_what_is_wrong_or_seldom_hydra_is_asked(files, words):
    write(files)
    with pytest.raises(NeedsHydra):
        of_files(words)
