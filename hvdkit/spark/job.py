"""A job of ranks: one barrier stage of Spark's, watched by the driver, which ends it when a rank has failed."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark import BarrierTaskContext, InheritableThread, SparkContext
from pyspark.accumulators import Accumulator, AccumulatorParam

from hvdkit.errors import HorovodInternalError, LaunchError
from hvdkit.spark.reports import Report, find_cause
from hvdkit.spark.task import RankSpec, run_rank
from hvdkit.spark.watch import Progress, Verdict, Watch

_LOOK_S = 0.25
_END_S = 15.0  # Spark kills the Python workers of a cancelled job within 4 s


class _Reports(AccumulatorParam[list[Report]]):
    """Adds lists. An accumulator tells the driver of a failed rank while the other tasks still run."""

    def zero(self, value: list[Report]) -> list[Report]:
        return []

    def addInPlace(self, value1: list[Report], value2: list[Report]) -> list[Report]:  # noqa: N802, N803
        return [*value1, *value2]


@dataclass
class _Task:
    """Runs on an executor: a rank."""

    spec: RankSpec
    failures: Accumulator[list[Report]]

    def __call__(self, _: Iterable[Any]) -> Iterator[Report]:
        report = run_rank(self.spec, BarrierTaskContext.get())
        if report.status not in ("returned", "repeated"):
            self.failures.add([report])
        yield report


@dataclass
class _Collected:
    """What the thread of the job leaves."""

    reports: list[Report] = field(default_factory=list)
    error: BaseException | None = None


def run_job(context: SparkContext, spec: RankSpec, ranks: int, start_timeout: float) -> list[Report]:
    """Run a job to its end; returns a report of each rank, or those that there are if the job has failed.

    The job is cancelled when a rank fails, and when this call is interrupted; Spark then ends its tasks, and with them
    the ranks. Raises LaunchError if the ranks do not start within start_timeout seconds, HorovodInternalError if Spark
    fails otherwise.
    """
    group, collected = f"hvdkit-{uuid.uuid4().hex}", _Collected()
    failures = context.accumulator([], _Reports())
    executors = _list_executors(context)

    def collect() -> None:
        try:
            context.setJobGroup(group, f"hvdkit: {ranks} ranks", interruptOnCancel=True)
            task = _Task(spec, failures)
            collected.reports = context.parallelize(range(ranks), ranks).barrier().mapPartitions(task).collect()
        except BaseException as error:
            collected.error = error

    thread = InheritableThread(target=collect, name="hvdkit-spark-job", daemon=True)
    thread.start()
    watch, verdict = Watch(ranks, start_timeout, time.monotonic()), None
    try:
        while thread.is_alive() and verdict is None:
            thread.join(_LOOK_S)
            verdict = watch.judge(time.monotonic(), _read_progress(context, group), bool(failures.value))
    finally:
        if thread.is_alive():
            context.cancelJobGroup(group)
            thread.join(_END_S)
    reports = collected.reports or list(failures.value)
    cause = find_cause(reports)
    if (verdict == "lost" and cause is None) or (cause is not None and cause.status == "repeated"):
        return [_describe_loss(context, executors)]
    if not reports:
        raise _explain(verdict, collected.error, start_timeout, ranks)
    return reports


def _explain(verdict: Verdict | None, error: BaseException | None, start_timeout: float, ranks: int) -> Exception:
    if verdict == "late":
        return LaunchError(
            f"The {ranks} ranks have not started within {start_timeout:g} s (start_timeout). Does another job of this "
            "application use the executors? See the driver's log, and Spark's web interface."
        )
    reason = str(error).partition("Driver stacktrace")[0].strip() if error is not None else "its job has not ended"
    return HorovodInternalError(f"Spark could not run the ranks: {reason}")


def _describe_loss(context: SparkContext, before: Sequence[str]) -> Report:
    now = _list_executors(context)
    gone = [each for each in before if each not in now]
    which = f"The executor at {', '.join(gone)} is gone. " if gone else ""
    text = (
        f"Spark has lost a task of the job. {which}The executor may have been killed, been preempted or run out of "
        "memory: see Lost executor and Lost task in the driver's log for the cause."
    )
    return Report(-1, "", "repeated", text=text)


def _list_executors(context: SparkContext) -> list[str]:
    """The executors of the application, and the driver, as host:port."""
    infos = context._jsc.sc().statusTracker().getExecutorInfos()
    return [f"{info.host()}:{info.port()}" for info in infos]


def _read_progress(context: SparkContext, group: str) -> Progress | None:
    tracker = context.statusTracker()
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        for number in info.stageIds if info is not None else ():
            with contextlib.suppress(AttributeError):  # the stage is not there yet
                stage = tracker.getStageInfo(number)
                return Progress(stage.numActiveTasks, stage.currentAttemptId)  # type: ignore[union-attr]
    return None
