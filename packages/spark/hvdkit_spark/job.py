"""A job of ranks: one barrier stage of Spark, monitored by the driver, which ends it when a rank has failed."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pyspark import InheritableThread, SparkContext
from pyspark.accumulators import Accumulator, AccumulatorParam

from hvdkit.errors import LaunchTimeoutError
from hvdkit_spark.job_monitor import JobMonitor
from hvdkit_spark.reports import Report, describe_loss
from hvdkit_spark.task import RankSpec

_LOOK_S = 0.25
_END_S = 15.0  # Spark kills the Python workers of a cancelled job within 4 s


@dataclass
class _Collected:
    """The result of the job's thread."""

    reports: list[Any] = field(default_factory=list)
    error: BaseException | None = None


def run_job(context: SparkContext, spec: RankSpec, ranks: int, start_timeout: float) -> list[Report]:
    """Run a job to its end; returns a report of each rank, or the reports so far if the job has failed.

    context: the active SparkContext.
    spec: the job's specification, the same for all ranks.
    ranks: number of ranks.
    start_timeout: seconds until all ranks must run.
    The job is cancelled when a rank fails, and when this call is interrupted; Spark then ends its tasks, and with them
    the ranks. Raises LaunchTimeoutError if the ranks do not start within start_timeout seconds, HorovodInternalError if
    Spark itself cannot run it.
    """
    group, collected = f"hvdkit-{uuid.uuid4().hex}", _Collected()
    failures = _open_failures(context)

    def collect() -> None:
        try:
            context.setJobGroup(group, f"hvdkit: {ranks} ranks", interruptOnCancel=True)
            task = _plan_task(pickle.dumps(spec), failures)
            collected.reports = context.parallelize(range(ranks), ranks).barrier().mapPartitions(task).collect()
        except BaseException as error:
            collected.error = error

    thread = InheritableThread(target=collect, name="hvdkit-spark-job", daemon=True)
    thread.start()
    watch, verdict = JobMonitor(ranks, start_timeout, time.monotonic()), None
    try:
        while thread.is_alive() and verdict is None:
            thread.join(_LOOK_S)
            verdict = watch.check(time.monotonic(), _count_active(context, group), bool(failures.value))
    finally:
        if thread.is_alive():
            context.cancelJobGroup(group)
            thread.join(_END_S)
    reports = [Report(**each) for each in collected.reports or failures.value]
    if reports:
        return reports
    if verdict == "late":
        raise LaunchTimeoutError(
            f"The {ranks} ranks have not started within {start_timeout:g} s (start_timeout). Does another job of this "
            "application use the executors? See the driver's log, and Spark's web interface.",
            code="spark-ranks-late",
        )
    return [describe_loss(str(collected.error))]


def _open_failures(context: SparkContext) -> Accumulator[list[dict[str, Any]]]:
    """Make an accumulator for reports of failed ranks: the driver reads them while other tasks still run."""

    class _Lists(AccumulatorParam[list[dict[str, Any]]]):  # here, so that it is pickled by value: see _plan_task
        def zero(self, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return []

        def addInPlace(self, value1: list[dict[str, Any]], value2: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [*value1, *value2]

    return context.accumulator([], _Lists())


def _plan_task(
    spec: bytes, failures: Accumulator[list[dict[str, Any]]]
) -> Callable[[Iterable[Any]], Iterator[dict[str, Any]]]:
    """Make the function that runs on an executor.

    It is pickled by value, so that it can report that hvdkit is missing.
    """

    def run_task(_: Iterable[Any]) -> Iterator[dict[str, Any]]:
        import dataclasses
        import pickle
        import socket

        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        try:
            from hvdkit_spark.task import run_rank

            report = dataclasses.asdict(run_rank(pickle.loads(spec), context))
        except ImportError as error:
            text = f"the executor cannot import hvdkit: {error}. Install hvdkit[spark] there, as on the driver"
            number, host = context.partitionId(), socket.gethostname()
            report = {"rank": number, "host": host, "status": "not started", "text": text}
        if report["status"] != "returned":
            failures.add([report])
        yield report

    return run_task


def _count_active(context: SparkContext, group: str) -> int:
    """Count the tasks of the job that run now."""
    tracker, active = context.statusTracker(), 0
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        stages = [tracker.getStageInfo(number) for number in (info.stageIds if info is not None else ())]
        active += sum(stage.numActiveTasks for stage in stages if stage is not None)
    return active
