"""Each key of a composed config deleted, set to null and set to values of other types.

The check reports an error that names the key, or accepts the config. It never raises.
"""

import copy

import pytest
from omegaconf import OmegaConf

import exp
from exp.check.__main__ import main as check
from exp.config.freeze import COMPOSITION

EXPERIMENTS = ("gan", "gpt", "dann")
WORDS = {"default": [], **{name: [f"experiment={name}"] for name in EXPERIMENTS}}
NODES = sorted(set(exp.compose([])) - {COMPOSITION})
# Written on the command line as it stands in YAML.
WRONG = {
    bool: ("word", [1], {"a": 1}, 2.5),
    int: ("word", [1], {"a": 1}, True),
    float: ("word", [1], {"a": 1}, True),
    str: (3.5, [1], {"a": 1}, True),
    list: (3, {"a": 1}, "word"),
    dict: (3, [1], "word"),
    type(None): ([1], {"a": 1}, 2.5, "word", True),
}


def keys_below(plain, path):
    yield path, plain
    for name, value in plain.items() if isinstance(plain, dict) else ():
        yield from keys_below(value, (*path, name))


def edits(value, *, all_types):
    """The name of each edit and its value; `all_types`: every wrong type instead of one."""
    yield "delete", None
    if value is not None:
        yield "null", None
    for other in WRONG[type(value)] if all_types else WRONG[type(value)][:1]:
        yield "set", other


def edited(whole, path, what, other):
    plain = copy.deepcopy(whole)
    node = plain
    for name in path[:-1]:
        node = node[name]
    if what == "delete":
        del node[path[-1]]
    else:
        node[path[-1]] = other
    return plain


def is_named(path, text):
    """Whether a message names a key, a key above or below it, or the entry of a mapping that was deleted."""
    dotted = ".".join(path)
    return dotted in text or any(f"{'.'.join(path[:end])}: " in text for end in range(1, len(path))) or path[-1] in text


def assert_each_edit_is_answered(words, node, *, all_types):
    whole = OmegaConf.to_container(exp.compose(words), resolve=False)
    del whole[COMPOSITION]
    for path, value in keys_below(whole[node], (node,)):
        for what, other in edits(value, all_types=all_types):
            config = OmegaConf.create(edited(whole, path, what, other))
            OmegaConf.set_struct(config, True)  # as exp.compose returns it
            try:
                exp.validate(config)
            except exp.ConfigError as error:
                text = str(error)
                same_group = any(f"\n  {path[0]}." in f"\n{line}" for line in text.splitlines()[1:])
                assert is_named(path, text) or same_group, (path, what, other, text)


@pytest.mark.parametrize("node", NODES)
def test_validate_names_each_edited_key_of_the_default_config(node, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_each_edit_is_answered([], node, all_types=False)


@pytest.mark.slow
@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("name", WORDS)
def test_validate_names_each_edited_key_of_an_experiment(name, node, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_each_edit_is_answered(WORDS[name], node, all_types=True)


def written(value):
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value).replace("'", "").replace(" ", "")


def assert_each_command_is_answered(words, node, capfd, *, all_types):
    whole = OmegaConf.to_container(exp.compose(words), resolve=False)
    for path, value in keys_below(whole[node], (node,)):
        key = ".".join(path)
        for what, other in edits(value, all_types=all_types):
            override = f"~{key}" if what == "delete" else f"{key}={written(other)}"
            status = check([*words, override])
            said = "".join(capfd.readouterr())
            assert status in (0, 2), (override, said)
            assert "Traceback" not in said, override
            assert status == 0 or is_named(path, said) or f"\n  {path[0]}." in said, (override, said)


@pytest.mark.parametrize("node", ["launch", "trainer", "sweep", "weights"])
def test_the_check_command_names_each_deleted_key(node, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name in exp.compose([])[node]:
        status = check([f"~{node}.{name}"])
        said = capfd.readouterr().err
        assert (status, f"  {node}.{name}: " in said or name == "_target_") == (2, True), said


@pytest.mark.slow
@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("name", WORDS)
def test_the_check_command_names_each_edited_key(name, node, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert_each_command_is_answered(WORDS[name], node, capfd, all_types=True)


def test_resume_auto_needs_a_composed_config():
    plain = OmegaConf.to_container(exp.compose(["resume=auto"]), resolve=False)
    del plain[COMPOSITION]
    with pytest.raises(exp.ConfigError, match=r"auto, in a config that exp\.compose did not make"):
        exp.validate(OmegaConf.create(plain))
