"""hvdkit docs: lists the pages of the documentation, searches them, and prints a page."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.suggestion import did_you_mean
from hvdkit.tools.installed import find_data

_EXPLANATION = """\
List the pages of the documentation, print one, or search all. The pages are those of the installed version.
"""

_EXAMPLES = """\
examples:
  hvdkit docs                            the list of pages
  hvdkit docs clusters/hostfiles | less  prints a page; the last part of its name, hostfiles, is enough
  hvdkit docs --search HVDKIT_ENGINE     lines of all pages that contain the text, in any case
"""

_HEADING = re.compile(r"^# +(.+)$", re.MULTILINE)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "docs", help="list, print or search the pages of the documentation", description=_EXPLANATION, epilog=_EXAMPLES
    )
    parser.add_argument("page", nargs="?", metavar="PAGE", help="print this page")
    parser.add_argument("--search", metavar="TEXT", help="print the lines that contain this text, with their pages")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """List the pages, print a page, or print the lines with a text; returns the exit code, 1 if no line has it."""
    pages = find_pages()
    if options.search is not None:
        chosen = pages if options.page is None else {name: pages[name] for name in [choose(pages, options.page)]}
        lines = find_lines(chosen, options.search)
        sys.stdout.writelines(f"{line}\n" for line in lines)
        return 0 if lines else 1
    if options.page is not None:
        sys.stdout.write(pages[choose(pages, options.page)].read_text(encoding="utf-8"))
        return 0
    width = max(map(len, pages))
    print("\n".join(f"{name:<{width}}  {title_of(page)}" for name, page in pages.items()))
    print("\nhvdkit docs PAGE prints a page.")
    return 0


def find_pages() -> dict[str, Path]:
    """Find the pages of the installed hvdkit, by name. Raises HvdkitError if there are none."""
    folder, files = find_data("documents", "docs", "**/*.md")
    return {page.relative_to(folder).with_suffix("").as_posix(): page for page in files}


def title_of(page: Path) -> str:
    """Return the first heading of a page, without code marks; "" without a heading."""
    found = _HEADING.search(page.read_text(encoding="utf-8"))
    return found[1].replace("`", "") if found else ""


def choose(pages: Mapping[str, Path], name: str) -> str:
    """Choose the page with this name, or the only one that ends with it; raises HvdkitError with the nearest names."""
    wanted = name.removeprefix("docs/").removesuffix(".md")
    ends = [page for page in pages if page == wanted or page.endswith(f"/{wanted}")]
    if wanted in pages or len(ends) == 1:
        return wanted if wanted in pages else ends[0]
    if ends:
        raise HvdkitError(f"{wanted} is the end of several pages: {', '.join(ends)}. Write one of them.")
    names = [*pages, *(page.rpartition("/")[2] for page in pages)]
    hint = did_you_mean(wanted, names, 0.6) or " hvdkit docs lists them."
    raise HvdkitError(f"there is no page {wanted}.{hint}")


def find_lines(pages: Mapping[str, Path], text: str) -> list[str]:
    """Find the lines that contain a text, in any case, as "PAGE: LINE"."""
    return [
        f"{name}: {line.strip()}"
        for name, page in pages.items()
        for line in page.read_text(encoding="utf-8").splitlines()
        if text.casefold() in line.casefold()
    ]
