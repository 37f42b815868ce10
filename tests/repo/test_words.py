"""The words of the glossary in CONTRIBUTING.md: those that it replaces are counted, and their number only falls."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "hvdkit").rglob("*.py")), *sorted(ROOT.glob("packages/*/hvdkit_*/**/*.py"))]
#: Word -> how often docstrings and comments may have it. Lower a number when you have removed some.
MOST = {
    "told": 0,
    "tell": 4,
    "tells": 0,
    "said": 1,
    "hear": 1,
    "hears": 0,
    "heard": 1,
    "asked": 7,
    "settle": 7,
    "settled": 0,
    "piece": 9,
    "pieces": 42,
    "meet": 0,
    "meets": 0,
    "stranger": 0,
    "strangers": 0,
}


def texts(path: Path) -> Iterator[str]:
    """Docstrings and comments of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    with path.open("rb") as file:
        yield from (token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT)


def test_words_that_the_glossary_replaces_get_fewer() -> None:
    counts = Counter(word for path in FILES for text in texts(path) for word in re.findall(r"[a-z]+", text.lower()))
    found = {word: counts[word] for word in MOST}
    more = {word: count for word, count in found.items() if count > MOST[word]}
    assert not more, "use a word of the glossary in CONTRIBUTING.md"
    assert found == MOST, "fewer than before: lower the numbers in MOST"


def test_no_public_name_has_such_a_word() -> None:
    """Classes and functions are named with words of the field; KNOWN may only get shorter."""
    names = {
        node.name
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_"
    }
    assert {name for name in names if REPLACED & set(name.lower().split("_"))} == KNOWN


REPLACED = {"told", "tell", "hear", "settle", "said", "piece", "look", "meet"}
KNOWN = {"Piece", "look_at_cores", "settle"}
