"""hvd.track(): averages logged values over all ranks, a window of steps at a time; rank 0 writes them.

The windows, and the thread that writes, save time in steps: three values a step cost one of 0.75 ms x1.07, and with an
allreduce in each step x1.44 (`hvdrun -np 2 python -m benchmarks.tracking`; docs/guides/tracking.md).
"""

from __future__ import annotations

import contextlib
import operator
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdkit.engine.api import (
    Buffer,
    Engine,
    Group,
    Operation,
    Sum,
    broadcast_object,
    collective_step,
    do,
    global_process_set,
    is_initialized,
    reduce_options,
    runtime,
)
from hvdkit.engine.observe.totals import COUNTER
from hvdkit.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    LocalFailureError,
    MissingDependencyError,
    RanksDisagreeError,
    TrackError,
)
from hvdkit.launcher_channel import Totals
from hvdkit.tracking.output import Output, take_output
from hvdkit.tracking.own_series import Window, own_series, pack_window
from hvdkit.tracking.rows import Floats, Row, describe_rows, make_row, pack_rows, unpack_rows
from hvdkit.tracking.targets import Path, Targets
from hvdkit.tracking.writer import End, end_of


@dataclass(frozen=True)
class _Averaging:
    """Rows whose averages are under way. sums: of all ranks, after the operation."""

    rows: list[Row]
    window: Window | None
    sums: Floats
    work: Operation


class Tracker:
    """The result of track(); a context manager. If an exception leaves the block, it closes without the last window.

    Runs of MLflow and W&B then end as FAILED, or as KILLED for KeyboardInterrupt. If the ranks of the job may change,
    and elastic.run calls the function again after the exception, the next track() continues them.
    """

    #: False if `samples` is only a weight, and the number of samples is unknown.
    counts_samples = True

    def __init__(self, targets: Targets, every: int) -> None:
        self._targets, self._every = targets, every
        self._output: Output | None = None
        self._may_change = False
        self._rows: list[Row] = []
        self._averaging: _Averaging | None = None
        self._engine: Engine | None = None
        self._name = ""  # of its operations: several trackers may average at the same time
        self._next_step, self._samples, self._closed = 0, 0.0, False
        self._since: tuple[float, int, Totals] | None = None  # end of the previous window: time, step, sums

    def log(self, values: Mapping[str, Any], *, step: int | None = None, samples: float = 1) -> None:
        """Log values of a step, with the same keys and steps on every rank.

        values: numbers or scalar tensors.
        step: if None, the last call's plus 1, starting at 0.
        samples: of this rank since the last call, the weight of its values; 0 for a rank without samples.

        Every `every` calls, one allreduce beside training begins to average all values; they are written when it is
        complete. Raises TrackError for an invalid key or value; RanksDisagreeError, on all ranks, if their keys or
        steps differ.
        """
        if self._closed:
            raise TrackError("log(): the tracker is closed. Log inside the `with` block of track().")
        group = self._enter()
        row = make_row(values, self._next_step if step is None else _read_step(step), samples)
        self._next_step = row.step + 1
        self._rows.append(row)
        counted = row.samples if self.counts_samples else 0.0
        COUNTER.samples += counted
        if self._since is None:
            self.start(row.step)
        else:
            self._samples += counted
        averaging = self._averaging
        if averaging is not None:
            if group.engine.thread is None:
                group.engine.drive()
            if averaging.work.done:
                self._finish(group)
        if len(self._rows) >= self._every:
            self._begin(group)

    def start(self, step: int = -1) -> None:
        """Begin the first window of hvdkit's own series after this step; otherwise the first log() begins it."""
        self._enter()
        self._since, self._samples = (time.monotonic(), step, COUNTER.now()), 0.0

    def flush(self) -> None:
        """Average the logged values, and pass them to the writers; collective."""
        group = self._enter()
        self._begin(group)
        self._finish(group)

    def close(self) -> None:
        """Average and write all remaining values; collective. Does nothing if closed, or after hvd.shutdown()."""
        if self._closed:
            return
        self._closed = True
        try:
            if is_initialized():
                self.flush()
        except BaseException as error:
            self._end(self._end_of(error))
            raise
        self._end("FINISHED")

    def __enter__(self) -> Tracker:
        """See close()."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *where: object) -> None:
        """Call close(), or abandon() after an exception."""
        if error is None:
            self.close()
        else:
            self.abandon(self._end_of(error))

    def abandon(self, end: End | None = "FAILED") -> None:
        """Write the averaged values, and close; not collective, for a training that has failed.

        end: of the runs; None to leave them to the next tracker of these targets. Runs are always left if the ranks of
        the job may change, and have done so since.
        """
        self._closed = True
        averaging = self._averaging
        # Without a thread this rank was not rank 0, and after hvd.shutdown() its present rank is unknown.
        open_here = self._output is not None and self._output.is_open
        if open_here and averaging is not None and averaging.work.done and averaging.work.error is None:
            self._hand_on(averaging)
        self._end(None if self._may_change and self._is_of_an_earlier_world else end)

    @property
    def continuing(self) -> Targets:
        """The same targets, for another tracker that continues this tracker's runs."""
        return self._targets if self._output is None else self._targets.following(self._output.resume)

    @property
    def _is_of_an_earlier_world(self) -> bool:
        return not is_initialized() or global_process_set.group("Tracker").engine is not self._engine

    def _end_of(self, error: BaseException) -> End | None:
        return None if self._may_change and _is_a_change(error) else end_of(error)

    def _end(self, end: End | None) -> None:
        """See abandon()."""
        if self._output is not None and end is not None:
            self._output.end(end)

    def _enter(self) -> Group:
        """Return the present ranks' group. In a new world, drops values that the old one has not averaged."""
        group: Group = global_process_set.group("Tracker.log()")
        if group.engine is not self._engine:
            self._engine = group.engine
            self._name = f"track.{group.engine.count('track')}"
            self._rows, self._averaging, self._since = [], None, None
            if self._output is not None:
                self._output.world = self._engine
                if group.transport.rank:
                    self._output.leave()
        return group

    def open(self) -> None:
        """Open the writers on rank 0; collective. Raises rank 0's error on all ranks."""
        group, given = self._enter(), (*self._targets.describe(), ("argument every of hvd.track()", repr(self._every)))
        collective_step(group.engine, "track", None, name="arguments", options=given)
        self._targets.check()
        if isinstance(self._every, bool) or not isinstance(self._every, int) or self._every < 1:
            raise TrackError(f"track(): every is {self._every!r}; it must be a whole number of at least 1.")
        self._may_change = runtime("track()").may_change
        output = take_output(self._targets, self._engine)
        error: Exception | None = None
        if group.transport.rank:
            output.leave()
        else:
            try:
                pickle.dumps(output.targets.places)  # another error than open()'s would be this rank's alone
                output.open()
            except Exception as problem:
                error = problem
        text = "" if error is None else f"{type(error).__name__}: {error}"
        places = {} if text else output.targets.places
        text, output.resume, places = broadcast_object((text, output.resume, places), name="track")
        output.targets = output.targets.at(places)  # for this rank, if it becomes rank 0
        if text:
            output.end("FAILED")
        if isinstance(error, (TrackError, MissingDependencyError)):
            raise error
        if text:
            raise TrackError(f"track(): rank 0 cannot open the targets. {text}") from error
        self._output = output

    def _begin(self, group: Group) -> None:
        """Begin to average the rows; first waits for earlier averages that are under way."""
        self._finish(group)
        rows, self._rows = self._rows, []
        window = self._end_window(rows)
        transport = group.transport
        packed = np.concatenate([pack_rows(rows), pack_window(window, transport.rank, transport.size)])
        options = reduce_options(["float64"], Sum, 1.0, 1.0, "log()") + describe_rows(rows)
        described, buffers = [("float64", packed.shape)], [Buffer(packed, "float64")]
        work = do(group, "allreduce", self._name, described, buffers, options, wait=False)
        self._averaging = _Averaging(rows, window, packed, work)

    def _end_window(self, rows: list[Row]) -> Window | None:
        if self._since is None or not rows:
            return None
        began, first, before = self._since
        now, totals = time.monotonic(), COUNTER.now()
        added = totals.since(before)
        window = Window(rows[-1].step - first, now - began, self._samples, added)
        self._since, self._samples = (now, rows[-1].step, totals), 0.0
        return window

    def _finish(self, group: Group) -> None:
        """Wait for the averages under way, and pass them on."""
        averaging, self._averaging = self._averaging, None
        if averaging is None:
            return
        try:
            group.engine.wait(averaging.work)
        except RanksDisagreeError as error:
            (_, keys), (_, steps), _ = describe_rows(averaging.rows)
            raise type(error)(
                f"Tracker.log(): the ranks did not log the same. {error} This rank has logged the keys "
                f"{keys or 'none'} in {steps} steps. Log the same keys and steps on every rank, with samples=0 on one "
                "that has no value."
            ) from None
        except HorovodInternalError:
            self._rows = []
            raise
        self._hand_on(averaging)

    def _hand_on(self, averaging: _Averaging) -> None:
        if is_initialized() and runtime("log()").world.rank:
            return
        averages, rest = unpack_rows(averaging.rows, averaging.sums)
        if averages:
            averages[-1][1].update(own_series(averaging.window, rest))
            assert self._output is not None
            self._output.put(averages)


def _is_a_change(error: BaseException) -> bool:
    """Return whether elastic.run calls the training function again after this exception."""
    lost = isinstance(error, HorovodInternalError) and not isinstance(error, (LocalFailureError, RanksDisagreeError))
    return lost or isinstance(error, HostsUpdatedInterrupt)


def _read_step(step: int) -> int:
    with contextlib.suppress(TypeError):
        return operator.index(step)
    raise TrackError(f"log(): step is {step!r}; it must be a whole number.")


def track(
    *,
    tensorboard: Path | None = None,
    wandb: str | Mapping[str, Any] | None = None,
    mlflow: str | Mapping[str, Any] | None = None,
    csv: Path | None = None,
    writers: Mapping[str, Any] | None = None,
    every: int = 50,
) -> Tracker:
    """Make rank 0 write logged values, averaged over all ranks, and hvdkit's own series; collective.

    tensorboard: a folder.
    wandb: a project, or the arguments of wandb.init().
    mlflow: a tracking URI, or a mapping of uri, experiment, run_name, run_id and tags.
    csv: a file; it is appended to.
    writers: name -> target, of writers of installed packages (entry points of the group hvdkit.writers).
    every: calls of log() per allreduce.

    Rank 0's values of these arguments are used, so they may contain the time.
    Own series: hvdkit/step_ms, samples_per_s, exposed_ms, late_ms, late_rank, reduced_mb, efficiency.
    Raises NotInitializedError before init(); on all ranks RanksDisagreeError if they give different targets or another
    `every`; TrackError if no target is given or rank 0 cannot write, and MissingDependencyError there for a package
    that is not installed.
    """
    return open_tracker(Targets(tensorboard=tensorboard, wandb=wandb, mlflow=mlflow, csv=csv, writers=writers), every)


def open_tracker(targets: Targets, every: int) -> Tracker:
    """Open a tracker of these targets, and of hvdrun if it collects metrics; collective. See track()."""
    config = runtime("track()").config
    hvdrun = config.launcher_channel if config.metrics_s and config.launcher_channel else None
    tracker = Tracker(replace(targets, hvdrun=hvdrun), every)
    tracker.open()
    return tracker
