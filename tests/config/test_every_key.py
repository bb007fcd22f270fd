"""Edits of every key in a composed config: the key is deleted, set to null and set to values of other types.

The check accepts the config or reports an error that names the key. It never raises another exception.
"""

import fnmatch

import pytest
from omegaconf import OmegaConf, open_dict

import exp
from exp.cli.check import main as check
from exp.config.frozen import COMPOSITION

WORDS = {"default": [], **{name: [f"experiment={name}"] for name in ("gan", "gpt", "dann")}}
WRONG = {
    bool: ("word", [1], {"a": 1}, 2.5),
    int: ("word", [1], {"a": 1}, True),
    float: ("word", [1], {"a": 1}, True),
    str: (3.5, [1], {"a": 1}, True),
    list: (3, {"a": 1}, "word"),
    dict: (3, [1], "word"),
    type(None): ([1], {"a": 1}, 2.5, "word", True),
}
# If one of these keys is deleted, the error may be at the key that depends on it.
USED_ELSEWHERE = {
    "metrics.accuracy.average": "monitor: ",
    "model.layers.*": "metrics.",
    "objective.cross_entropy": "data.num_classes: ",
    "objective.domain.target": "model.layers.",
    "phases.*.forward": "objective.",
}
KEYS_IN_A_TEST = 20
DELETED = object()


def composed(name):
    """Return a composed config as plain data, and the paths of all keys with their values."""
    plain = OmegaConf.to_container(exp.compose(WORDS[name]), resolve=False)
    del plain[COMPOSITION]
    return plain, list(items_below(plain, ()))


def items_below(plain, path):
    for name, value in plain.items():
        yield (*path, name), value
        if isinstance(value, dict):
            yield from items_below(value, (*path, name))


def edited(node, path, value):
    """Return a copy of nested mappings with another value at a path, and the same order of keys."""
    name, *rest = path
    changed = {**node, name: edited(node[name], rest, value) if rest else value}
    return {key: one for key, one in changed.items() if one is not DELETED}


def is_named(path, text):
    """Return True if a message contains a key, its parent, or a key of the same group."""
    key = ".".join(path)
    places = [*(f"{'.'.join(path[:end])}: " for end in range(1, len(path))), f"\n  {path[0]}."]
    places += [f"\n  {place}" for pattern, place in USED_ELSEWHERE.items() if fnmatch.fnmatch(key, pattern)]
    return any(place in text for place in (key, path[-1], *places))


def assert_each_edit_is_answered(plain, items, *, with_wrong_types):
    """Edit one key at a time in one config object, validate the config and restore the key."""
    config = OmegaConf.create(plain)
    OmegaConf.set_struct(config, True)  # as exp.compose returns it
    for path, value in items:
        others = [DELETED, *([] if value is None else [None]), *(WRONG[type(value)] if with_wrong_types else ())]
        for other in others:
            with open_dict(config):
                config.pop(path[0], None)
                config.update(edited({path[0]: plain[path[0]]}, path, other))
            message = None
            try:
                exp.validate(config)
            except exp.ConfigError as error:
                message = str(error)
            assert message is None or is_named(path, message), (path, other, message)
        with open_dict(config):
            config[path[0]] = plain[path[0]]


COUNT = len(composed("default")[1])


@pytest.mark.parametrize("first", range(0, COUNT, KEYS_IN_A_TEST))
def test_validate_names_each_deleted_or_null_key(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, items = composed("default")
    assert_each_edit_is_answered(plain, items[first : first + KEYS_IN_A_TEST], with_wrong_types=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_validate_names_each_edited_key(name, share, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, items = composed(name)
    assert_each_edit_is_answered(plain, share.of(items), with_wrong_types=True)


def override(path, value):
    """Return an edit of a key in the syntax of the command line."""
    if value is DELETED:
        return f"~{'.'.join(path)}"
    typed = {None: "null", True: "true"}.get(value) if not isinstance(value, list | dict) else None
    return f"{'.'.join(path)}={typed or str(value).replace(chr(39), '').replace(' ', '')}"


@pytest.mark.parametrize("node", ["launch", "trainer", "sweep", "weights"])
def test_the_check_command_names_each_deleted_key(node, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    names = set(exp.compose([])[node]) - {"_target_"}
    assert check([f"~{node}.{name}" for name in names]) == 2
    said = capfd.readouterr().err
    assert [name for name in names if f"  {node}.{name}: " not in said] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_the_check_command_names_each_edited_key(name, share, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for path, value in share.of(composed(name)[1]):
        for other in (DELETED, None, *WRONG[type(value)]):
            typed = override(path, other)
            status = check([*WORDS[name], typed])
            said = "".join(capfd.readouterr())
            assert status in (0, 2), (typed, said)
            assert "Traceback" not in said, typed
            assert status == 0 or is_named(path, said), (typed, said)


def test_resume_auto_needs_a_composed_config():
    config = OmegaConf.create({**composed("default")[0], "resume": "auto"})
    with pytest.raises(exp.ConfigError, match=r"auto, in a config that exp\.compose did not make"):
        exp.validate(config)
