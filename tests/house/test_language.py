"""Language rules of DESIGN.md that a test can check."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import exp

ROOT = Path(exp.__file__).parent
REPOSITORY = ROOT.parents[1]
SOURCES = sorted(path for path in ROOT.rglob("*.py") if "conf" not in path.relative_to(ROOT).parts[:1])
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# First words that make a docstring a fragment.
OPENER = re.compile(
    r"(What|Whether|Of|As|Those|That of|The same|None|Nothing|Where|How|One|Such|Whose|Who|Whoever|Both|Each|Else|Also|"
    r"By|To|With|Without|In|From|For|Behind|Beside|There)\b"
)
ARCHAISM = re.compile(
    r"\b(told|tells|behind|beside|besides|nobody|whoever|somebody|heed\w*|goes? on|went on|going on|in the place of|"
    r"of (?:its|one's|their|his) own|but for|mend\w*|cures?|goes with|go with|anew|thereof|wherever|such a one|"
    r"gives? back|taken apart|is asked of|has not|have not|there is none|shall|faults?|by itself|by themselves|lies in|"
    r"lie in|stands? in|as it is|as they are)\b",
    re.I,
)
# Technical terms that contain one of these words.
PLAIN = re.compile(r"segmentation faults?|page faults?", re.I)

IRREGULAR_PARTICIPLES = frozenset({
    *("told", "shown", "drawn", "said", "made", "given", "held", "kept", "found", "left", "taken", "seen", "known"),
    *("written", "sent", "met", "lost", "bound", "built", "chosen", "done", "gone", "spent", "thrown", "grown"),
    *("begun", "broken", "frozen", "hidden", "fallen", "forgotten", "meant", "thought", "caught", "behind", "beside"),
})  # fmt: skip
# Methods that hooks override, and methods that compiled forward programs call.
INTERFACES = frozenset({"ended", "passed", "evaluated", "engaged", "called", "computed", "asserted"})
VERBS_IN_ED = frozenset({"need", "feed", "seed", "reseed", "embed", "exceed", "proceed", "succeed", "speed"})
PROPERTIES = {"property", "cached_property", "setter"}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def prose(path: Path) -> Iterator[str]:
    """Yield docstrings, messages and comments of a module."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
    lines = map(str.strip, path.read_text().splitlines())
    yield from (line.partition("#")[2] for line in lines if line.startswith("#"))


def test_docstrings_begin_with_a_sentence():
    first_lines = [
        (path, text.splitlines()[0])
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node))
    ]
    wrong = [f"{path.relative_to(ROOT)}: {line}" for path, line in first_lines if OPENER.match(line)]
    assert len(wrong) <= 0.005 * len(first_lines), wrong


def test_texts_have_no_archaisms():
    texts = [(path, text) for path in SOURCES for text in prose(path)]
    pages = [(path, path.read_text()) for path in PAGES]
    lines = sum(path.read_text().count("\n") for path in [*SOURCES, *PAGES])
    found = [
        f"{path.relative_to(REPOSITORY)}: {match[0]}"
        for path, text in [*texts, *pages]
        for match in ARCHAISM.finditer(PLAIN.sub("", text))
    ]
    assert len(found) <= lines / 1000, found
    assert [one for one in found if one.startswith(("docs", "README"))] == []


def is_participle(name: str) -> bool:
    word = name.strip("_")
    is_regular = word.endswith("ed") and "_" not in word and word not in VERBS_IN_ED
    return name not in INTERFACES and (is_regular or word in IRREGULAR_PARTICIPLES)


def test_functions_are_no_participles():
    found = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and is_participle(node.name)
        and not {ast.unparse(one).rpartition(".")[2] for one in node.decorator_list} & PROPERTIES
    ]
    assert found == []
