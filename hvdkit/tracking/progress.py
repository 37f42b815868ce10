"""hvd.progress(): one bar for the job, or lines in a log, with samples per second over all ranks and the time left."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import IO, Any, Generic, Protocol, TypeVar

import numpy as np

from hvdkit.engine.api import Buffer, Sum, do, global_process_set, reduce_options, runtime
from hvdkit.errors import TrackError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_LINE_S = 10.0  # between two lines of a log
_DRAW_S = 0.1  # between two updates of the bar


class Sized(Protocol[T_co]):
    """An iterable with a length, such as torch's DataLoader."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[T_co]: ...


class View(Protocol):
    """Shows progress on rank 0."""

    def show(self, done: int, text: str) -> None:
        """Show the number of finished batches, and the rate."""

    def close(self) -> None:
        """End the display after the last batch, or when the loop was left."""


class Progress(Generic[T]):
    """The batches of a loader, with progress on rank 0. Made by progress()."""

    def __init__(self, loader: Sized[T], samples: float | None, label: str, stream: IO[str] | None) -> None:
        self._loader, self._samples, self._label, self._stream = loader, samples, label, stream

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[T]:
        """Yield the batches. Collective at the beginning of each pass."""
        rank = runtime("progress()").world.rank
        batches = len(self._loader)
        own = count_samples(self._loader) if self._samples is None else self._samples
        total = _sum_of_ranks(float("nan") if own is None else own)
        if rank:
            yield from self._loader
            return
        view = open_view(self._stream or sys.stderr, self._label, batches)
        began, shown = time.monotonic(), -_LINE_S
        done = 0
        try:
            for done, batch in enumerate(self._loader, 1):
                yield batch
                now = time.monotonic()
                if now - shown >= _DRAW_S or done == batches:
                    shown = now
                    view.show(done, describe(done, batches, now - began, total))
        finally:
            view.close()


def describe(done: int, batches: int, seconds: float, samples: float) -> str:
    """Return the rate and the remaining time. samples: of all ranks in the pass; nan if unknown."""
    if not done or seconds <= 0:
        return ""
    known = not math.isnan(samples)
    rate, unit = (samples * done / batches, "samples/s") if known else (float(done), "batches/s")
    left = round(seconds / done * max(0, batches - done))  # a loader may have more batches than its length
    return f"{rate / seconds:,.0f} {unit}, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"


def count_samples(loader: Any) -> float | None:
    """Return this rank's samples in a pass of torch's DataLoader with a batch size; None if unknown."""
    size = getattr(loader, "batch_size", None)
    if isinstance(size, bool) or not isinstance(size, int):
        return None
    whole = size * len(loader)
    try:
        return float(min(whole, len(loader.sampler)))
    except (AttributeError, TypeError):
        return float(whole)


def _sum_of_ranks(value: float) -> float:
    numbers = np.array([value], np.float64)
    group = global_process_set.group("progress()")
    options = reduce_options(["float64"], Sum, 1.0, 1.0, "progress()")
    do(group, "allreduce", "progress", [("float64", (1,))], [Buffer(numbers, "float64")], options)
    return float(numbers[0])


class Lines:
    """A View that writes a line to the log every ten seconds, and one at the end."""

    def __init__(self, stream: IO[str], label: str, batches: int) -> None:
        self._stream, self._label, self._batches = stream, label, batches
        self._shown = time.monotonic()
        self._last = ""

    def show(self, done: int, text: str) -> None:
        share = 100 * done // self._batches if self._batches else 100
        self._last = f"{self._label + ': ' if self._label else ''}{done} of {self._batches} ({share} %), {text}\n"
        if time.monotonic() - self._shown >= _LINE_S:
            self._write()

    def _write(self) -> None:
        self._shown = time.monotonic()
        self._stream.write(self._last)
        self._stream.flush()
        self._last = ""

    def close(self) -> None:
        if self._last:
            self._write()


class Bar:
    """A View that draws a bar on a terminal by rich."""

    def __init__(self, stream: IO[str], label: str, batches: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        self._bar = RichProgress(*columns, console=Console(file=stream), auto_refresh=False)
        self._task = self._bar.add_task(label, total=batches, rate="")
        self._bar.start()

    def show(self, done: int, text: str) -> None:
        self._bar.update(self._task, completed=done, rate=text, refresh=True)

    def close(self) -> None:
        self._bar.stop()


def open_view(stream: IO[str], label: str, batches: int) -> View:
    """Return a bar for a terminal, lines otherwise."""
    return Bar(stream, label, batches) if stream.isatty() else Lines(stream, label, batches)


def progress(
    loader: Iterable[T], *, samples: float | None = None, label: str = "", stream: IO[str] | None = None
) -> Progress[T]:
    """Show one bar for the job while the batches of a loader are used: rank 0's, with all ranks' samples per second.

    loader: torch's DataLoader, or another iterable with a length.
    samples: of this rank in a pass; None to query the DataLoader, or to show the rate in batches if it does not know.
    label: before the bar.
    stream: stderr if None; a terminal gets a bar, another stream a line every ten seconds.

    Each pass begins with a small allreduce, so all ranks must make it; the pass itself has none.
    Raises TrackError for a loader without a length, NotInitializedError before init().
    """
    runtime("progress()")
    try:
        len(loader)  # type: ignore[arg-type]
    except TypeError:
        raise TrackError(
            f"progress(): a {type(loader).__name__} has no length. Give the loader itself, or a list."
        ) from None
    return Progress(loader, samples, label, stream)  # type: ignore[arg-type]
