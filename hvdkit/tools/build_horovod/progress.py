"""Show how far a build is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import re
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_STEP = re.compile(r"\[\s*(\d+)%\]\s+(.*)")
_EVERY_PERCENT = 20


def parse_step(line: str) -> tuple[int, str] | None:
    """Take percent and what is being made from a line of make's output; None if it tells no progress."""
    found = _STEP.search(line)
    if found is None:
        return None
    return int(found.group(1)), found.group(2).split("/")[-1].removesuffix(".o")


class BuildProgress:
    """Given the build's lines one by one, shows the percentage; to be closed by leaving a `with`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told = 0
        self._bar = Progress(
            TextColumn("compiling"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[what]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("build", total=100, what="CMake looks around")

    def __enter__(self) -> BuildProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def listen(self, line: str) -> None:
        """Take a line of output."""
        step = parse_step(line)
        if step is None:
            return
        percent, what = step
        self._bar.update(self._task, completed=percent, what=what)
        if not self._console.is_terminal and percent >= self._told + _EVERY_PERCENT:
            self._told = percent - percent % _EVERY_PERCENT
            self._console.print(f"compiling: {percent} %")
