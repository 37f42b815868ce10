"""The first page stays short, and what it links to is there; the pages of docs/ are checked when the site is built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from planned_job import plan_job

from hvdkit.launch.cli.options import parse_arguments

ROOT = Path(__file__).parents[2]


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "examples/README.md", "hostfiles/README.md"])
def test_links_of_a_page_lead_to_files(name: str) -> None:
    page = ROOT / name
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_paths_of_the_repository_in_the_documents_exist() -> None:
    folders = "benchmarks|docs|examples|hostfiles|packages|tests"
    path = re.compile(rf"(?<![\w./@:-])(?:(?:{folders})/[\w./*-]*\w|hvdkit/[\w/]+\.py\b)")
    missing = [
        f"{page.relative_to(ROOT)}: {named}"
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]
        for named in path.findall(page.read_text())
        if page.name != "CHANGELOG.md" and "NAME" not in named and not list(ROOT.glob(named))
    ]
    assert missing == []


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_first_command_of_a_page_starts_a_script_of_the_clone_here(name: str) -> None:
    first = re.search(r"^    (hvdrun .*?)(?: +#.*)?$", (ROOT / name).read_text(), re.MULTILINE)
    assert first is not None
    job = plan_job(
        parse_arguments([*first[1].split()[1:-1], str(ROOT / first[1].split()[-1])]), {"PATH": "/usr/bin:/bin"}
    )
    assert job.local and job.ranks == 2
