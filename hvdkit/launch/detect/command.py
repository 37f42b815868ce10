"""Plan the ranks' command: Python scripts and modules run with this Python; check that the command exists."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import pkgutil
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.suggestion import did_you_mean

_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
# Options of python that are followed by a value.
_TAKES_VALUE = {"-W", "-X", "--check-hash-based-pycs"}


def plan_command(words: Sequence[str], *, module: bool, path: str, python: str = sys.executable) -> list[str]:
    """Plan the command of each rank.

    `train.py` runs with `python`, whether or not it is executable; a program on PATH whose name ends in .py stays as
    it is. module: the first word is a Python module. path: the ranks' PATH.
    """
    if module:
        return [python, "-m", *words]
    if not words[0].endswith(".py") or os.path.isdir(words[0]):
        return list(words)
    on_path = os.sep not in words[0] and not os.path.exists(words[0]) and shutil.which(words[0], path=path)
    return list(words) if on_path else [python, *words]


def check_working_directory() -> None:
    """Raise LaunchError if the working directory, in which the ranks are to start, has been removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise LaunchError(
            "the working directory has been removed, and the ranks would start in it. Change to another directory and "
            "start from there.",
            code="working-directory-removed",
        ) from None


def find_script(command: Sequence[str]) -> str:
    """Find the .py file that a python command line runs; "" if it runs none."""
    if not _PYTHON.fullmatch(Path(command[0]).name):
        return ""
    words = iter(command[1:])
    for word in words:
        if word in _TAKES_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            return word if word.endswith(".py") else ""
        elif word in ("-", "-c", "-m") or (word[1] != "-" and word[-1] in "cm"):
            return ""
    return ""


def check_command(words: Sequence[str], *, module: bool, path: str) -> None:
    """Raise LaunchError if the program, the script or the module does not exist on this machine, or cannot be read.

    words: the command as typed. path: the ranks' PATH.
    """
    try:
        _check_command(words, module=module, path=path)
    except PermissionError as error:
        raise LaunchError(
            f"{error.filename} cannot be read: {error.strerror}. Check its owner and mode.", code="command-unreadable"
        ) from None


def _check_command(words: Sequence[str], *, module: bool, path: str) -> None:
    if not words[0]:
        raise LaunchError(
            "the command begins with an empty word. Check the quotes and variables of the command line.",
            code="command-empty",
        )
    if module:
        _check_module(words[0])
        return
    command = plan_command(words, module=False, path=path)
    if len(command) == len(words):
        _check_program(words[0], path)
    script = find_script(command)
    if script and not Path(script).is_file():
        folder = Path(script).parent
        similar = did_you_mean(Path(script).name, [name for name in list_names(folder) if name.endswith(".py")])
        what = "is a directory, not a script" if Path(script).is_dir() else f"does not exist in {folder.absolute()}"
        raise LaunchError(f"the script {script} {what}. Check the path.{similar}", code="script-missing")
    if script:
        with open(script, "rb"):  # raises PermissionError
            pass


def _check_program(program: str, path: str) -> None:
    if shutil.which(program, path=path) is not None:
        return
    if Path(program).is_dir():
        raise LaunchError(f"{program} is a directory, not a program. Check the path.", code="program-is-directory")
    if os.sep not in program:
        if Path(program).is_file():
            raise LaunchError(
                f"{program} is not on PATH. For the file in this directory, write ./{program}.",
                code="program-in-directory",
            )
        names = (name for folder in path.split(os.pathsep) for name in list_names(folder))
        raise LaunchError(
            f"the program {program} is not on PATH. Check the spelling.{did_you_mean(program, names)}",
            code="program-not-on-path",
        )
    if not Path(program).exists():
        similar = did_you_mean(Path(program).name, list_names(Path(program).parent))
        raise LaunchError(
            f"the program {program} does not exist (directory: {os.getcwd()}). Check the path.{similar}",
            code="program-missing",
        )
    raise LaunchError(
        f"{program} is not executable. Run: chmod +x {program}, or start it with its interpreter.",
        code="program-not-executable",
    )


def _check_module(name: str) -> None:
    """Search for the module as the ranks will, without importing its packages."""
    parts = name.split(".")
    here, spec = os.getcwd(), None
    for number in range(1, len(parts) + 1):
        full = ".".join(parts[:number])
        if spec is None:
            spec = importlib.machinery.PathFinder.find_spec(full, [here]) or _find_top(full)
            names = [each.name for each in pkgutil.iter_modules([here, *sys.path])]
        else:
            folders = list(spec.submodule_search_locations or ())
            names = [f"{spec.name}.{each.name}" for each in pkgutil.iter_modules(folders)]
            spec = importlib.machinery.PathFinder.find_spec(full, folders)
        if spec is None:
            similar = did_you_mean(full, names)
            raise LaunchError(
                f"the Python module {full} does not exist, neither in {here} nor for {sys.executable}. Check the "
                f"spelling, or install it.{similar}",
                code="module-missing",
            )
    assert spec is not None
    if spec.submodule_search_locations is not None:
        folders = list(spec.submodule_search_locations)
        if importlib.machinery.PathFinder.find_spec(f"{name}.__main__", folders) is None:
            raise LaunchError(
                f"{name} is a package without __main__.py. Name a module in it: -m {name}.MODULE",
                code="module-without-main",
            )


def _find_top(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):  # a loaded module without a spec
        return None


def list_names(folder: str | Path) -> tuple[str, ...]:
    """List the names in a folder, in order; none if it does not exist or cannot be read."""
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()
