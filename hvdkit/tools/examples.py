"""hvdkit examples: lists the gallery of scripts, and writes one into the current folder."""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.suggestion import did_you_mean
from hvdkit.tools.installed import find_data

_EXPLANATION = """\
List the example scripts, or write one into the current folder. Each is complete, shorter than 100 lines, and downloads
nothing.
"""

_EXAMPLES = """\
examples:
  hvdkit examples                        the list
  hvdkit examples pytorch_digits         writes pytorch_digits.py; then: hvdrun -np 2 pytorch_digits.py
  hvdkit examples --show keras_digits    prints it instead
"""


@dataclass(frozen=True)
class Example:
    """A script of the gallery. name: without `.py`. summary: the first sentence of its docstring. path: its file."""

    name: str
    summary: str
    path: str


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "examples", help="list the example scripts, or write one here", description=_EXPLANATION, epilog=_EXAMPLES
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="write this example into the current folder")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--show", action="store_true", help="print the example in place of writing it")
    form.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """List the gallery, or write or print a script; returns the exit code."""
    gallery = find_gallery()
    if options.name is None:
        if options.show:
            raise HvdkitError("--show needs the name of an example.")
        if options.json:
            print(json.dumps([asdict(example) for example in gallery], indent=2))
        else:
            width = max(len(example.name) for example in gallery)
            print("\n".join(f"{example.name:<{width}}  {example.summary}" for example in gallery))
            print("\nhvdkit examples NAME writes one into this folder.")
        return 0
    if options.json:
        raise HvdkitError("--json is for the list; leave out the name or --json.")
    example = choose(gallery, options.name)
    text = Path(example.path).read_text()
    if options.show:
        sys.stdout.write(text)
        return 0
    target = Path(f"{example.name}.py")
    try:
        with target.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise HvdkitError(f"{target} exists already and is not overwritten. Rename it, or use --show.") from None
    print(f"wrote {target}. Start it: {command_of(example)}")
    return 0


def find_gallery() -> list[Example]:
    """Find the examples of the installed hvdkit. Raises HvdkitError if there are none."""
    _, scripts = find_data("examples", "examples", "*.py")
    return [Example(script.stem, summary_of(script), str(script)) for script in scripts]


def summary_of(script: Path) -> str:
    """Return the first sentence of a script's docstring, without the reference to the README."""
    text = " ".join((ast.get_docstring(ast.parse(script.read_text())) or "").split())
    text = text.replace(f"examples/{script.name}", script.name).replace(" FILE", f" {script.name}")
    return text.partition("; see ")[0].partition(". ")[0].rstrip(".")


def command_of(example: Example) -> str:
    """Return the command that starts a script: the command in its summary, else two ranks of hvdrun."""
    named = re.search(r"`((?:hvdrun|python) [^`]+)`", example.summary)
    return named[1] if named else f"hvdrun -np 2 {example.name}.py"


def choose(gallery: list[Example], name: str) -> Example:
    """Find an example by its name, with or without `.py`; raises HvdkitError with the nearest name."""
    wanted = name.removesuffix(".py")
    by_name = {example.name: example for example in gallery}
    if wanted in by_name:
        return by_name[wanted]
    hint = did_you_mean(wanted, by_name, 0.6) or " hvdkit examples lists them."
    raise HvdkitError(f"there is no example {wanted}.{hint}")
