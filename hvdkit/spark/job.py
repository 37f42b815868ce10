"""A job of ranks: one barrier stage of Spark's, watched by the driver, which ends it when a rank has failed."""

from __future__ import annotations

import contextlib
import pickle
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark import InheritableThread, SparkContext
from pyspark.accumulators import Accumulator, AccumulatorParam

from hvdkit.errors import HorovodInternalError, LaunchError
from hvdkit.spark.reports import Report
from hvdkit.spark.task import RankSpec
from hvdkit.spark.watch import Progress, Verdict, Watch

_LOOK_S = 0.25
_END_S = 15.0  # Spark kills the Python workers of a cancelled job within 4 s


@dataclass
class _Collected:
    """What the thread of the job leaves."""

    reports: list[Any] = field(default_factory=list)
    error: BaseException | None = None


def run_job(context: SparkContext, spec: RankSpec, ranks: int, start_timeout: float) -> list[Report]:
    """Run a job to its end; returns a report of each rank, or those that there are if the job has failed.

    The job is cancelled when a rank fails, and when this call is interrupted; Spark then ends its tasks, and with them
    the ranks. Raises LaunchError if the ranks do not start within start_timeout seconds, HorovodInternalError if Spark
    fails otherwise.
    """
    group, collected = f"hvdkit-{uuid.uuid4().hex}", _Collected()
    failures = _open_failures(context)
    executors = _list_executors(context)

    def collect() -> None:
        try:
            context.setJobGroup(group, f"hvdkit: {ranks} ranks", interruptOnCancel=True)
            task = _plan_task(pickle.dumps(spec), failures)
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
    reports = [Report(**each) for each in collected.reports or failures.value]
    if verdict == "lost" and not reports:
        return [_describe_loss(context, executors)]
    if not reports:
        raise _explain(verdict, collected.error, start_timeout, ranks)
    return reports


def _open_failures(context: SparkContext) -> Accumulator[list[dict[str, Any]]]:
    """Reports of ranks that have failed: the driver sees them while other tasks still run."""

    class Lists(AccumulatorParam[list[dict[str, Any]]]):  # here, so that it is pickled by value: see _plan_task
        def zero(self, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return []

        def addInPlace(self, value1: list[dict[str, Any]], value2: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [*value1, *value2]

    return context.accumulator([], Lists())


def _plan_task(
    spec: bytes, failures: Accumulator[list[dict[str, Any]]]
) -> Callable[[Iterable[Any]], Iterator[dict[str, Any]]]:
    """What runs on an executor. It is pickled by value, so that it can report that there is no hvdkit."""

    def run_task(_: Iterable[Any]) -> Iterator[dict[str, Any]]:
        import dataclasses
        import pickle
        import socket

        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        try:
            from hvdkit.spark.task import run_rank

            report = dataclasses.asdict(run_rank(pickle.loads(spec), context))
        except ImportError as error:
            text = f"the executor cannot import hvdkit: {error}. Install hvdkit[spark] there, as on the driver"
            number, host = context.partitionId(), socket.gethostname()
            report = {"rank": number, "host": host, "status": "not started", "text": text}
        if report["status"] != "returned":
            failures.add([report])
        yield report

    return run_task


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
    return Report(-1, "", "executor lost", text=text)


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
                return Progress(stage.numActiveTasks, stage.currentAttemptId)
    return None
