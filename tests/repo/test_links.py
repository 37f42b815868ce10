from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HIDDEN = re.compile(r"(^|/)(\.|build/|dist/)")
PAGES = sorted(page for page in ROOT.rglob("*.md") if not HIDDEN.search(str(page.relative_to(ROOT))))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get: lower case, no punctuation, dashes for spaces."""
    text = CODE.sub("", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in HEADING.findall(text)}


def dead_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(CODE.sub("", page.read_text())):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        other = (page.parent / target).resolve() if target else page
        if not other.exists() or (anchor and other.suffix == ".md" and anchor not in anchors(other)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert not list(dead_links(page))
