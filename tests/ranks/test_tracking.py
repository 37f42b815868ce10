"""hvd.track() and hvd.progress(): averages over ranks, hvdkit's own series, places to write to, and errors."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elastic_job import train_and_kill
from hvdrun_job import ROOT
from numpy.typing import NDArray
from ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.engine.named.operation import JOINING, Operation
from hvdkit.errors import (
    HorovodInternalError,
    HvdkitError,
    MissingDependencyError,
    Preempted,
    RankLostError,
    TrackError,
)
from hvdkit.launcher_channel import Totals
from hvdkit.tracking import output
from hvdkit.tracking import progress as showing
from hvdkit.tracking.output import Output, take_output
from hvdkit.tracking.own_series import SERIES, Window, own_series, pack_window
from hvdkit.tracking.rows import Averages, make_row, pack_rows, unpack_rows
from hvdkit.tracking.targets import Targets
from hvdkit.tracking.tracker import Tracker, _Averaging
from hvdkit.tracking.writer import End
from hvdkit.tracking.writers.tensorboard_events import TensorBoardEvents
from hvdkit.tracking.writing_thread import WritingThread

Value = tuple[int, str, float]


def read_csv(path: Path) -> list[Value]:
    with path.open(newline="") as file:
        return [(int(line["step"]), line["key"], float(line["value"])) for line in csv.DictReader(file)]


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else math.nan


def test_averages_are_those_of_all_samples_together() -> None:
    drawn = np.random.default_rng(0)
    counts = [3, 0, 5]
    losses = [drawn.normal(size=(4, count)) for count in counts]  # rank -> step, sample
    rows = [
        [make_row({"loss": _mean(each), "b": 2}, step, len(each)) for step, each in enumerate(of_rank)]
        for of_rank in losses
    ]
    sums = np.sum([pack_rows(of_rank) for of_rank in rows], axis=0)
    found, rest = unpack_rows(rows[0], np.append(sums, 7.0))
    assert rest.tolist() == [7.0]
    for step, values in found:
        together = np.concatenate([of_rank[step] for of_rank in losses])
        assert values == {"b": pytest.approx(2), "loss": pytest.approx(together.mean())}
    none, _ = unpack_rows([make_row({"loss": 1.0}, 0, 0)], np.zeros(2))
    assert math.isnan(none[0][1]["loss"])


def test_the_rank_that_waits_least_is_the_one_that_the_others_wait_for() -> None:
    windows = [Window(10, 2.0, 160, Totals(10, waited, 4_000_000, 0)) for waited in (0.5, 0.1, 0.9)]
    sums = np.sum([pack_window(window, rank, 3) for rank, window in enumerate(windows)], axis=0)
    found = {name.removeprefix("hvdkit/"): value for name, value in own_series(windows[0], sums).items()}
    assert found == pytest.approx(
        {
            "step_ms": 200,
            "samples_per_s": 240,
            "exposed_ms": 10,
            "late_ms": (40 + 80) / 2,
            "late_rank": 1,
            "reduced_mb": 0.4,
            "efficiency": 1 - 0.05 / 0.2,
        }
    )
    assert set(found) == set(SERIES)
    on_a_gpu = Window(10, 2.0, 160, Totals(10, math.nan, 4_000_000, 0))
    assert set(own_series(on_a_gpu, pack_window(on_a_gpu, 0, 1))) == {
        *("hvdkit/step_ms", "hvdkit/samples_per_s", "hvdkit/reduced_mb")
    }
    assert own_series(None, sums) == {}
    uncounted = Window(10, 2.0, 0, Totals(0, 0.0, 0, 0))
    assert set(own_series(uncounted, pack_window(uncounted, 0, 1))) == {"hvdkit/step_ms"}


@pytest.mark.parametrize(
    ("values", "samples", "message"),
    [
        ({float("nan"): 1.0}, 1, "the key nan is not a name"),
        ({" ": 1.0}, 1, "the key ' ' is not a name"),
        ({"hvdkit/step_ms": 1.0}, 1, "as hvdkit's own series do"),
        ({"loss": torch.ones(3)}, 1, r"'loss' is a Tensor of shape \(3,\), not one number"),
        ({"loss": "0.5"}, 1, "'loss' is a str, not one number"),
        ({"loss": None}, 1, "'loss' is a NoneType"),
        ({"loss": 1.0}, -1, "samples is -1"),
        ({"loss": 1.0}, math.inf, "samples is inf"),
        ({"loss": 1.0}, "3", "samples is '3'"),
        ({"loss": 1.0}, np.float32("nan"), "samples is .*nan"),
    ],
)
def test_what_cannot_be_averaged_is_refused(values: dict[Any, Any], samples: Any, message: str) -> None:
    with pytest.raises(TrackError, match=message):
        make_row(values, 0, samples)


def test_a_loss_that_has_a_gradient_is_logged_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_row({"loss": torch.ones((), requires_grad=True)}, 0, 1).values == {"loss": 1.0}


def _train(folder: str) -> tuple[list[str], list[float]]:
    """Log a training of 25 steps, and what goes wrong; returns errors, and the losses times samples of this rank."""
    torch.set_num_threads(1)
    errors, mine, place = [], [], Path(folder)
    with joined():
        rank = hvd.rank()
        model = torch.nn.Linear(4, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        samples = [2, 0, 5][rank]
        with hvd.track(csv=place / "run.csv", tensorboard=place / "board", every=10) as tracker:
            for _ in range(25):
                optimizer.zero_grad()
                loss = (model(torch.full((max(samples, 1), 4), float(rank))) - 1).square().mean()
                loss.backward()
                optimizer.step()
                tracker.log({"loss": loss if samples else math.nan}, samples=samples)
                mine.append(float(loss) * samples)
        places = [place / "one.csv", place / "two.csv"]
        with hvd.track(csv=places[0], every=1) as one, hvd.track(csv=places[1], every=1) as two:
            counted: Any = np.int64(samples)
            for _ in range(3):  # the averages of both are under way at the same time
                one.log({"one": rank}, samples=counted)
                two.log({"two": rank}, samples=counted)
        for problem in (
            lambda: hvd.track(csv=place),
            lambda: hvd.track(csv=place / "other.txt"),
            lambda: hvd.track(),
            lambda: hvd.track(csv="", every=1),
            lambda: hvd.track(csv="x", every=0),
            lambda: hvd.track(csv=place / "run.csv" if rank == 0 else None),
            lambda: tracker.log({"loss": 1.0}),
            lambda: _log_different({"loss": 1.0, "accuracy": 1.0} if rank == 1 else {"loss": 1.0}, 0),
            lambda: _log_different({"loss": 1.0}, rank),
            lambda: hvd.progress(iter([1])),
        ):
            with pytest.raises(HvdkitError) as seen:
                problem()
            errors.append(f"{type(seen.value).__name__}: {seen.value}")
        with hvd.track(csv=place / f"of rank {rank}.csv") as own:
            own.log({"loss": 1.0})
        loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(7)), batch_size=2)
        stream = io.StringIO()
        assert [len(batch) for (batch,) in hvd.progress(loader, label="epoch 1", stream=stream)] == [2, 2, 2, 1]
        errors.append(stream.getvalue())
    return errors, mine


def _log_different(values: dict[str, float], step: int) -> None:
    with hvd.track(csv="different.csv") as tracker:
        tracker.log(values, step=step)


@pytest.mark.ranks
def test_what_ranks_log_is_averaged_and_what_is_wrong_is_told_on_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("epoch,loss\n")
    ranks = run_ranks(3, _train_in, str(tmp_path))
    losses = np.sum([mine for _, mine in ranks], axis=0) / 7
    written = read_csv(tmp_path / "run.csv")
    logged = [value for _, key, value in written if key == "loss"]
    assert [step for step, key, _ in written if key == "loss"] == list(range(25))
    assert logged == pytest.approx(losses.tolist())
    own = [(step, key.removeprefix("hvdkit/")) for step, key, _ in written if key != "loss"]
    assert [step for step, key in own if key == "step_ms"] == [9, 19, 24]
    assert read_events(tmp_path / "board") == [
        (step, key, pytest.approx(value, rel=1e-6)) for step, key, value in written
    ]
    assert len(list(tmp_path.glob("of rank *.csv"))) == 1 and read_csv(tmp_path / "of rank 0.csv")
    for name in ("one", "two"):
        values = [value for _, key, value in read_csv(tmp_path / f"{name}.csv") if key == name]
        assert values == pytest.approx([10 / 7] * 3)
    for errors, _ in ranks:
        for error, expected in zip(
            errors,
            (
                "TrackError: track(): rank 0 cannot open the targets. IsADirectoryError",
                "is another file, as it begins with 'epoch,loss'",
                "TrackError: track() was told no place to write to",
                "TrackError: track(): csv is ''; it must be a path",
                "TrackError: track(): every is 0",
                "the ranks disagree about the argument csv of hvd.track(): rank ",
                "TrackError: log(): the tracker is closed",
                "RanksDisagreeError: Tracker.log(): the ranks did not log the same",
                "the ranks disagree about the logged steps",
                "TrackError: progress(): a list_iterator has no length",
            ),
            strict=False,
        ):
            assert expected in error
    shown = [errors[-1] for errors, _ in ranks]
    assert shown[1:] == ["", ""] and shown[0].startswith("epoch 1: 4 of 4 (100 %), ") and "samples/s" in shown[0]


def _train_in(folder: str) -> tuple[list[str], list[float]]:
    import os

    before = os.getcwd()
    os.chdir(folder)
    try:
        return _train(folder)
    finally:
        os.chdir(before)


def _fit(path: str) -> list[str]:
    import keras

    import hvdkit.keras as hvd_keras

    hvd_keras.init()
    inputs = np.arange(40, dtype="float32").reshape(40, 1) / 40
    mine = slice(0, 24) if hvd_keras.rank() == 0 else slice(24, 40)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    callback = hvd_keras.callbacks.TrackCallback(csv=path)
    model.fit(
        inputs[mine],
        np.zeros((40, 1))[mine],
        batch_size=8,
        initial_epoch=3,
        epochs=5,
        validation_data=(inputs[:2], np.zeros((2, 1))),
        callbacks=[callback],
        verbose=0,
    )
    hvd_keras.shutdown()
    return [str(one) for one in model.metrics_names]


@pytest.mark.ranks
@pytest.mark.keras("torch")
def test_keras_epochs_are_averaged_over_all_samples(tmp_path: Path) -> None:
    pytest.importorskip("keras")
    run_ranks(2, _fit, str(tmp_path / "fit.csv"), backend="torch")
    written = {(step, key): value for step, key, value in read_csv(tmp_path / "fit.csv")}
    inputs = np.arange(40) / 40
    for epoch in (3, 4):
        assert written[epoch, "loss"] == pytest.approx((inputs**2).mean(), rel=1e-5)
        assert written[epoch, "mae"] == pytest.approx(inputs.mean(), rel=1e-5)
        assert written[epoch, "val_mae"] == pytest.approx(1 / 80, rel=1e-5)
        seconds = written[epoch, "hvdkit/step_ms"] / 1e3
        assert written[epoch, "hvdkit/samples_per_s"] * seconds == pytest.approx(40)


def read_events(folder: Path) -> list[Any]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = folder.iterdir()
    return [
        (event.step, value.tag, value.tensor.float_val[0] if value.tensor.float_val else value.simple_value)
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]


def test_a_row_of_many_values_and_an_empty_one_are_read_back_by_tensorboard(tmp_path: Path) -> None:
    values = {f"norm/layer{number:04d}.weight": float(number) for number in range(2000)}
    writer = TensorBoardEvents(tmp_path)
    writer.write([(0, {}), (1, values)])
    writer.write([(2, {})])
    writer.close("FINISHED")
    assert read_events(tmp_path) == [(1, key, value) for key, value in values.items()]


class Failing:
    """A writer whose place is gone after the first rows."""

    name = "failing"
    resume: Mapping[str, str] = {}

    def __init__(self, error: BaseException | None = None) -> None:
        self.rows: list[Averages] = []
        self.calls: list[str] = []
        self.error = error or OSError("no space left")

    def write(self, rows: Sequence[Averages]) -> None:
        self.calls.append("write")
        if self.rows:
            raise self.error
        self.rows += rows

    def close(self, end: End | None) -> None:
        self.calls.append(f"close {end}")


class Keeping(Failing):
    """A writer whose place stays, and which cannot be closed."""

    name = "keeping"

    def write(self, rows: Sequence[Averages]) -> None:
        self.rows += rows

    def close(self, end: End | None) -> None:
        raise self.error


@pytest.mark.parametrize("error", [OSError("no space left"), SystemExit(0)])
def test_a_place_that_fails_is_told_of_and_training_goes_on(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    writer, others = Failing(error), [Keeping(error), Keeping(error)]
    thread = WritingThread([others[0], writer, others[1]])
    for step in range(3):
        thread.put([(step, {"loss": 1.0})])
    thread.close("FINISHED", 60.0)
    assert writer.calls == ["write", "write", "close FINISHED"], "no more rows after the error, but it is closed"
    assert writer.rows == [(0, {"loss": 1.0})] and [len(other.rows) for other in others] == [3, 3]
    assert caplog.text.count("keeping was not closed") == 2
    assert caplog.text.count("failing cannot be written, so it lacks the values from step 1 on") == 1
    assert not [one for one in threading.enumerate() if one.name == "hvdkit-track" and one.is_alive()]


class Hanging(Failing):
    """A writer that does not answer for some time."""

    def __init__(self) -> None:
        super().__init__()
        self.request, self.answers = threading.Event(), threading.Event()

    def write(self, rows: Sequence[Averages]) -> None:
        self.request.set()
        self.answers.wait()
        self.rows += rows

    def close(self, end: End | None) -> None:
        pass


def test_rows_for_a_place_that_does_not_answer_are_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdkit.tracking.writing_thread.MOST_WAITING", 3)
    writer = Hanging()
    thread = WritingThread([writer])
    for step in range(9):
        thread.put([(step, {"loss": 1.0})])
        assert writer.request.wait(60.0)
    writer.answers.set()
    thread.close("FINISHED", 60.0)
    assert [step for step, _ in writer.rows] == [0, 1, 2, 3]  # the first was being written while three waited
    assert caplog.text.count("failing does not take values: 3 windows wait, and those from step 4 on are dropped") == 1


class Run:
    """A writer that has a run."""

    name = "mlflow"
    resume: Mapping[str, str] = {"run_id": "7"}

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.ends: list[End | None] = []

    def write(self, rows: Sequence[Averages]) -> None:
        self.steps += [step for step, _ in rows]

    def close(self, end: End | None) -> None:
        self.ends.append(end)


def tracker_of(targets: Targets, world: object, *, may_change: bool = False) -> Tracker:
    """A tracker as track() has made it in an earlier world."""
    tracker = Tracker(targets, 1)
    tracker._output, tracker._may_change = take_output(targets, world), may_change
    tracker._output.open()
    return tracker


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, "FINISHED"),
        (ValueError(), "FAILED"),
        (HorovodInternalError(), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(0), "FINISHED"),
        (SystemExit("why"), "FAILED"),
        (Preempted(), "KILLED"),
    ],
)
def test_a_run_ends_as_the_block_does(error: BaseException | None, end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    monkeypatch.setattr(output, "open_writers", lambda targets: [run])
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(BaseException), tracker_of(Targets(mlflow="uri"), None):
        if error is not None:
            raise error
    assert run.ends == [end] and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("how", "end", "code"),
    [
        ("SIGTERM", "KILLED", -signal.SIGTERM),
        ("hvdkit's hook", "FAILED", 1),
        ("sys.exit", "FINISHED", 3),  # Python does not pass its code on
        pytest.param("ValueError", "FAILED", 1, marks=pytest.mark.slow),
        pytest.param("KeyboardInterrupt", "KILLED", -signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("end", "FINISHED", 0, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_no_block_ends_ends_with_the_process(how: str, end: str, code: int, tmp_path: Path) -> None:
    lines = tmp_path / "runs"
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}", "FAKE_MLFLOW": str(lines)}
    command = [sys.executable, str(ROOT / "tests" / "support" / "tracked_script.py"), how]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    (created, run), *ends = (line.split() for line in lines.read_text().splitlines())
    assert (done.returncode, created, ends) == (code, "created", [[end, run]]), done.stderr


def test_outputs_that_a_signal_ends_end_at_the_same_time_and_share_its_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits: list[float] = []
    close = WritingThread.close

    def note_limit(thread: WritingThread, end: End | None, timeout_s: float) -> None:
        limits.append(timeout_s)
        close(thread, end, timeout_s)

    monkeypatch.setattr(WritingThread, "close", note_limit)
    last_is_closed, never = threading.Event(), threading.Event()

    class Waiting(Run):
        def close(self, end: End | None) -> None:
            assert last_is_closed.wait(60.0)

    class Last(Run):
        def close(self, end: End | None) -> None:
            last_is_closed.set()

    class Hanging(Run):
        def close(self, end: End | None) -> None:
            never.wait()

    def end_two(first: Run, second: Run, limit_s: float) -> None:
        runs = iter([first, second])
        monkeypatch.setattr(output, "open_writers", lambda targets: [next(runs)])
        for _ in range(2):
            Output(Targets(mlflow="uri"), None).open()
        output._end_all("KILLED", limit_s)

    end_two(Waiting(), Last(), 60.0)
    assert not caplog.records
    limits.clear()
    end_two(Hanging(), Hanging(), 0.2)
    never.set()
    assert len(limits) == 2 and sum(limits) < 0.3


def test_the_next_tracker_goes_on_in_the_run_that_a_world_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[Targets, Run]] = []

    def open_run(targets: Targets) -> list[Run]:
        opened.append((targets, Run()))
        return [opened[-1][1]]

    monkeypatch.setattr(output, "open_writers", open_run)
    targets = Targets(mlflow="uri")
    first = Output(targets, "first world")
    first.open()
    tracker = tracker_of(targets, "second world", may_change=True)
    with pytest.raises(RankLostError), tracker:
        raise RankLostError
    tracker_of(targets, "second world").close()
    assert [one.ends for _, one in opened] == [[], ["FINISHED"]], "in one world two trackers have two runs"
    tracker = tracker_of(targets, "third world")
    assert tracker._output is first and len(opened) == 2
    first.leave()
    assert opened[0][1].ends == [None]
    first.put([(3, {"loss": 1.0})])  # as a rank that is 0 now, and knows what rank 0 had opened
    tracker.close()
    assert opened[2][0].mlflow == {"uri": "uri", "run_id": "7"}
    assert (opened[2][1].steps, opened[2][1].ends) == ([3], ["FINISHED"])


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.native("ranks that are lost are replaced")
def test_when_rank_0_dies_another_rank_goes_on_in_the_same_file_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MLFLOW", str(tmp_path / "runs"))
    command = (str(ROOT / "tests" / "support" / "tracking_elastic_script.py"), str(tmp_path), "150")
    job = train_and_kill(3, [0], "--min-np", "2", command=command)
    assert job.process.returncode == 0, job.output
    steps = [step for step, key, _ in read_csv(tmp_path / "run.csv") if key == "size"]
    assert steps[0] == 0 and steps[-1] == 149 and set(steps) >= {*range(6), *range(140, 150)}
    (created, run), *others = (line.split() for line in (tmp_path / "runs").read_text().splitlines())
    assert created == "created" and {one for _, one in others} == {run}, others
    assert [what for what, _ in others if what != "RUNNING"] == ["continued", "FINISHED"]


def test_a_rank_that_has_not_written_does_not_begin_when_the_world_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    tracker = Tracker(Targets(csv=path), 1)
    rows = [make_row({"loss": 1.0}, 0, 1)]
    tracker._averaging = _Averaging(rows, None, np.ones(4), Operation("track", JOINING, (), done=True))
    tracker.abandon()
    assert not path.exists()


@pytest.mark.parametrize(("module", "argument"), [("wandb", "project"), ("mlflow", "sqlite:///x.db")])
def test_a_package_that_is_missing_is_named(module: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from hvdkit.tracking.targets import open_writers

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install 'hvdkit\[{module}\]'"):
        open_writers(Targets(**{module: argument}))  # type: ignore[arg-type]


def test_the_rate_is_that_of_all_ranks_and_the_time_left_that_of_the_rest() -> None:
    assert showing.describe(25, 100, 50.0, 12_800) == "64 samples/s, 0:02:30 left"
    assert showing.describe(25, 100, 50.0, math.nan) == "0 batches/s, 0:02:30 left"
    assert showing.describe(0, 100, 0.0, 1.0) == ""
    assert showing.describe(3, 2, 1.0, math.nan) == "3 batches/s, 0:00:00 left"


def test_a_bar_is_drawn_on_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        view = showing.open_view(stream, "train", 4)
        view.show(2, "10 samples/s")
        view.close()
    assert "\x1b" in terminal.getvalue() and "2/4" in terminal.getvalue()
    assert file.getvalue() == "train: 2 of 4 (50 %), 10 samples/s\n"
