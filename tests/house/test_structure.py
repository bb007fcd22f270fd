"""The rules of the house: each is one short test over the source text."""

import ast
import collections
import functools
import re
import sys
from pathlib import Path

import exp

ROOT = Path(exp.__file__).parent
SOURCES = sorted(path for path in ROOT.rglob("*.py") if "conf" not in path.relative_to(ROOT).parts[:1])
CONF = ROOT / "conf"

RANKS = {
    "errors": 0, "shared_types": 0, "files": 0, "spelling": 0, "signals": 0, "nested": 0, "redaction": 0, "output": 0,
    "lighter_imports": 0, "command_clock": 0, "interpreter_exit": 0, "name_clash": 0, "source_signature": 0,
    "config": 1, "models": 1, "functions": 1, "data": 1, "objectives": 1, "optim": 1,
    "precision": 2, "strategies": 2, "hooks": 2, "loggers": 2, "tensorboard": 2, "engine": 2,
    "check": 3, "launch": 3, "sweeps": 3, "construct": 3, "build": 3, "run_report": 3, "report_pictures": 3,
    "run": 4, "saved_runs": 4, "plan": 4,
}  # fmt: skip
ENTRY_RANK = 5

PUBLIC = [
    "ConfigError", "ExpError", "Fault", "Interrupted", "MissingExtraError", "RankError", "Report", "RunError",
    "compose", "fit", "load", "validate",
]  # fmt: skip


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room(path: Path) -> str:
    """The first part of its dotted name; a room's `__main__`, which is a command, is a room of its own."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts) if path.name == "__main__.py" else parts[0].removesuffix(".py")


def rank(name: str) -> int:
    return RANKS.get(name, ENTRY_RANK)


def imports(path: Path, *, anywhere: bool = True) -> list[str]:
    """Dotted names that a module imports, those inside functions included unless told otherwise."""
    nodes = ast.walk(tree(path)) if anywhere else tree(path).body
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "exp" else [node.module]
    return found


def exp_edges() -> set[tuple[str, str]]:
    edges = set()
    for path in SOURCES:
        if path == ROOT / "__init__.py":
            continue
        for name in imports(path):
            if name.startswith("exp.") and not name.startswith("exp.__"):
                edges.add((room(path), name.split(".")[1]))
    return edges


def edges() -> dict[str, set[str]]:
    """Each module and those that it imports, in functions and for annotations included."""
    names = {path: f"exp.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}" for path in SOURCES}
    modules = {name.removesuffix(".__init__") for name in names.values()} - {"exp"}
    found: dict[str, set[str]] = {name: set() for name in modules}
    for path, name in names.items():
        for node in ast.walk(tree(path)):
            there = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                there = [one if one in modules else node.module for one in whole]
            found.setdefault(name.removesuffix(".__init__"), set()).update(set(there) & modules - {name})
    return found


def test_imports_only_go_down_in_rank():
    wrong = [f"{here} -> {there}" for here, there in exp_edges() if here != there and rank(here) < rank(there)]
    assert not wrong, f"these imports go up: {wrong}"


def test_rooms_of_equal_rank_have_no_cycles():
    edges = {(here, there) for here, there in exp_edges() if here != there}
    reach = {here: {there for start, there in edges if start == here} for here, _ in edges}
    for _ in range(len(reach)):
        for here in reach:
            reach[here] |= set().union(*(reach.get(there, set()) for there in reach[here]))
    assert [here for here in reach if here in reach[here]] == []


def test_modules_have_no_circles():
    """An import for an annotation alone is one, too: what two modules know of each other is one idea, or a third's."""
    reach = {name: set(there) for name, there in edges().items()}
    todo = True
    while todo:
        longer = {name: there.union(*(reach[one] for one in there)) for name, there in reach.items()}
        todo, reach = longer != reach, longer
    assert [name for name in reach if name in reach[name]] == []


def test_walls_between_the_columns():
    for path in SOURCES:
        here = room(path)
        names = imports(path)
        roots = {name.split(".")[0] for name in names}
        if here == "config":
            top = {name.split(".")[0] for name in imports(path, anywhere=False)}
            assert not top & {"torch", "lightning", "torchmetrics"}, f"{path} imports torch at module level"
        if here in ("models", "functions", "data", "objectives", "optim"):
            assert not roots & {"hydra", "omegaconf", "lightning"}, f"{path} knows Hydra or Lightning"
        if here == "hooks":
            assert not any(name.startswith("exp.config") for name in names), f"{path} knows the config: see build.py"
        if "omegaconf" in roots or "hydra" in roots:
            knows = ("config", "construct", "run", "check", "saved_runs", "sweeps")
            assert here in knows or rank(here) == ENTRY_RANK, path


def test_package_inits_reexport_nothing():
    for path in ROOT.rglob("__init__.py"):
        if path != ROOT / "__init__.py":
            assert ast.get_docstring(tree(path)) or not path.read_text().strip(), path
            assert imports(path) == [], path


def test_public_names_are_the_committed_ones():
    assert sorted(exp.__all__) == sorted(PUBLIC)
    modules = {path.stem for path in ROOT.glob("*.py")} | {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert not set(PUBLIC) & modules, "a public name equals a module's"
    for name in PUBLIC:
        assert getattr(exp, name) is not None


def test_functions_are_read_without_scrolling():
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= 62, f"{path}:{node.lineno} {node.name} has {length} lines"


def named_by_users() -> set[str]:
    """Modules whose classes stand in conf/ as a `_target_`."""
    texts = "\n".join(path.read_text() for path in CONF.rglob("*.yaml"))
    return {target.rpartition(".")[0] for target in re.findall(r"_target_: *(exp\.[\w.]+)", texts)}


def test_a_module_is_one_idea_and_not_a_piece_of_one():
    """A small module with one importer is most often cut off from it; some are an idea of their own."""
    importers = collections.Counter(there for here in edges().values() for there in here)
    lines = {name: text_of(name).count("\n") for name in importers if name.count(".") > 1}
    cut = [name for name, count in lines.items() if count < 80 and importers[name] == 1]
    assert len(set(cut) - named_by_users()) <= 15, sorted(set(cut) - named_by_users())


def text_of(name: str) -> str:
    path = ROOT.joinpath(*name.split(".")[1:])
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def test_a_file_name_means_one_thing():
    names = collections.Counter(path.stem for path in SOURCES if path.stem not in ("__init__", "__main__"))
    assert len(several := [name for name, count in names.items() if count > 1]) <= 5, several


def test_the_type_checker_is_silenced_seldom_and_with_a_reason():
    lines = [(path, line) for path in SOURCES for line in path.read_text().splitlines() if "# type: ignore" in line]
    assert len(lines) <= 20
    for path, line in lines:
        assert re.search(r"# type: ignore\[[\w, -]+\]  # \w+", line), f"{path}: {line.strip()}"


def test_no_file_is_a_drawer():
    drawers = {"utils", "common", "misc", "helpers", "manager", "util", "helper"}
    assert [path for path in SOURCES if path.stem in drawers] == []


def test_no_config_get_with_a_default_and_no_bare_except():
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno} bare except"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                owner = ast.unparse(node.func.value)
                assert not (len(node.args) == 2 and owner.split(".")[0] in ("cfg", "config")), f"{path}:{node.lineno}"


def test_every_yaml_begins_with_what_it_is_and_how_to_select_it():
    files = sorted(CONF.rglob("*.yaml"))
    assert files
    for path in files:
        lines = path.read_text().splitlines()
        # Hydra reads `# @package` from the header, wherever in it that line stands.
        comment = next(line for line in lines if not line.startswith("# @package"))
        assert comment.startswith("# "), f"{path}: {comment!r}"
        assert len(comment) > 15, f"{path}: {comment!r}"


def test_no_name_hides_a_module_of_the_standard_library():
    """A file that is run by path, as an editor does, has its folder first on the path of imports."""
    names = [path for path in SOURCES if path.stem in sys.stdlib_module_names]
    names += [folder for folder in {path.parent for path in SOURCES} if folder.name in sys.stdlib_module_names]
    # A hook that configs of saved runs name, in a folder where no program stands.
    assert [str(path.relative_to(ROOT)) for path in names] == ["hooks/profile.py"]
