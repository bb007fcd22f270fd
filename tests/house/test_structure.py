"""Structural rules of DESIGN.md, checked in the source text."""

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
    "lighter_imports": 0, "interpreter_exit": 0,
    "config": 1, "models": 1, "functions": 1, "data": 1, "objectives": 1, "optim": 1,
    "precision": 2, "strategies": 2, "hooks": 2, "loggers": 2, "tensorboard": 2, "engine": 2,
    "check": 3, "launch": 3, "sweeps": 3, "construct": 3, "build": 3, "run_report": 3, "report_pictures": 3,
    "run": 4, "start": 4, "saved_runs": 4, "plan": 4,
    "cli": 5, "extras": 5,
}  # fmt: skip
ENTRY_RANK = 6

PUBLIC = [
    "ConfigError", "ExpError", "ErrorDetails", "Interrupted", "MissingExtraError", "RankError", "Report", "RunError",
    "compose", "fit", "load", "validate",
]  # fmt: skip


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room(path: Path) -> str:
    """Return the room of a module, which is the first part of its name; for a `__main__`, return the path."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts) if path.name == "__main__.py" else parts[0].removesuffix(".py")


def rank(name: str) -> int:
    return RANKS.get(name, ENTRY_RANK)


def imports(path: Path, *, anywhere: bool = True) -> list[str]:
    """Return the names that a module imports, also inside functions if `anywhere`."""
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


@functools.cache
def edges() -> dict[str, set[str]]:
    """Return the imports of each module, including those in functions and for annotations."""
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


def cyclic(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes of a graph that are on a cycle."""
    reach, longer = {}, graph
    while longer != reach:
        reach = longer
        longer = {name: there.union(*(reach.get(one, set()) for one in there)) for name, there in reach.items()}
    return [name for name in reach if name in reach[name]]


def test_imports_have_no_cycles():
    rooms: dict[str, set[str]] = collections.defaultdict(set)
    for here, there in exp_edges():
        if here != there:
            rooms[here].add(there)
    assert cyclic(rooms) == []
    assert cyclic(edges()) == []


def test_the_core_never_imports_extras():
    # exp.serve run=DIR exports the run, so serve may import export.
    allowed = {("serve", "export")}
    for path in SOURCES:
        parts = path.relative_to(ROOT).parts
        here = parts[1] if parts[0] == "extras" else None
        for name in imports(path):
            if name.startswith("exp.extras."):
                there = name.split(".")[2]
                assert here == there or (here, there) in allowed, f"{path} imports {name}"


def test_packages_import_only_their_libraries():
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
            knows = ("config", "construct", "start", "check", "saved_runs", "sweeps", "cli", "extras")
            assert here in knows, path


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


def test_functions_fit_on_a_screen():
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= 62, f"{path}:{node.lineno} {node.name} has {length} lines"


def named_by_users() -> set[str]:
    """Return the modules of the classes in the `_target_` keys of conf/."""
    texts = "\n".join(path.read_text() for path in CONF.rglob("*.yaml"))
    return {target.rpartition(".")[0] for target in re.findall(r"_target_: *(exp\.[\w.]+)", texts)}


def test_small_modules_have_several_importers():
    importers = collections.Counter(there for here in edges().values() for there in here)
    lines = {name: text_of(name).count("\n") for name in importers if name.count(".") > 1}
    cut = [name for name, count in lines.items() if count < 80 and importers[name] == 1]
    assert len(set(cut) - named_by_users()) <= 15, sorted(set(cut) - named_by_users())


def text_of(name: str) -> str:
    path = ROOT.joinpath(*name.split(".")[1:])
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def test_file_names_are_unique_and_specific():
    drawers = {"utils", "common", "misc", "helpers", "manager", "util", "helper"}
    assert [path for path in SOURCES if path.stem in drawers] == []
    # `python -m exp.NAME` runs src/exp/NAME.py, which runs NAME.py of cli/ or extras/.
    starters = [path for path in SOURCES if "exp.cli.dispatch" in imports(path) or path.stem == "__init__"]
    names = collections.Counter(path.stem for path in SOURCES if path not in starters and path.stem != "__main__")
    assert len(several := [name for name, count in names.items() if count > 1]) <= 5, several


def test_ignored_types_have_a_reason():
    lines = [(path, line) for path in SOURCES for line in path.read_text().splitlines() if "# type: ignore" in line]
    assert len(lines) <= 20
    for path, line in lines:
        assert re.search(r"# type: ignore\[[\w, -]+\]  # \w+", line), f"{path}: {line.strip()}"


def test_no_config_get_and_no_bare_except():
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno} bare except"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                owner = ast.unparse(node.func.value)
                assert not (len(node.args) == 2 and owner.split(".")[0] in ("cfg", "config")), f"{path}:{node.lineno}"


def test_every_yaml_starts_with_a_comment():
    files = sorted(CONF.rglob("*.yaml"))
    assert files
    for path in files:
        lines = path.read_text().splitlines()
        # Hydra reads `# @package` from any line of the header.
        comment = next(line for line in lines if not line.startswith("# @package"))
        assert comment.startswith("# "), f"{path}: {comment!r}"
        assert len(comment) > 15, f"{path}: {comment!r}"


def test_no_name_hides_a_standard_module():
    """Editors run a file by its path, which puts its folder first on the import path."""
    names = [path for path in SOURCES if path.stem in sys.stdlib_module_names]
    names += [folder for folder in {path.parent for path in SOURCES} if folder.name in sys.stdlib_module_names]
    # This name stays, because configs of saved runs have it. Its folder has no program.
    assert {str(path.relative_to(ROOT)) for path in names} <= {"extras/debugging/profile.py"}
