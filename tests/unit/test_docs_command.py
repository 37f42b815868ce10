"""hvdkit docs: lists the pages, prints one and searches all."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit import cli

DOCS = Path(__file__).parents[2] / "docs"


def test_every_page_is_listed_with_a_title(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.partition("\n\n")[0].splitlines()]
    assert {name for name, _ in lines} == {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}


@pytest.mark.parametrize("name", ["clusters/hostfiles", "hostfiles", "docs/clusters/hostfiles.md"])
def test_a_page_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs", name]) == 0
    assert capsys.readouterr().out == (DOCS / "clusters" / "hostfiles.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hvdrn", "there is no page hvdrn. Did you mean hvdrun?"),
        ("zzzzzz", "there is no page zzzzzz. hvdkit docs lists them."),
        ("index.md", "index is the end of several pages: clusters/index, "),
    ],
)
def test_another_name_is_refused_with_the_nearest(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in ("clusters/index", "guides/index", "clusters/hvdrun"):
        (tmp_path / "documents" / page).with_suffix(".md").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "documents" / page).with_suffix(".md").write_text("# A page")
    monkeypatch.setattr("hvdkit.__file__", str(tmp_path / "__init__.py"))
    assert cli.main(["docs", name]) == 2
    assert words in capsys.readouterr().err


def test_a_search_gives_pages_and_lines_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs", "clusters/hvdrun", "--search", "DRY-RUN"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.startswith("clusters/hvdrun: ") and "dry-run" in line.lower() for line in lines)
    assert cli.main(["docs", "--search", "no page has this text"]) == 1
