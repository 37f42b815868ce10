"""The Spark application of this process: its context, and how many tasks it can run at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.log import logger
from hvdkit.optional_import import optional_import

_PAUSE_S = 0.5
_SAY_AFTER_S = 5.0


def find_context() -> Any:
    """The active SparkContext. Raises LaunchError if there is none, or one in which no barrier stage can run."""
    context = optional_import("pyspark", "spark").SparkContext._active_spark_context
    if context is None:
        raise LaunchError(
            "There is no active SparkContext in this process. Create one first: SparkSession.builder.getOrCreate(). A "
            "session of Spark Connect has none, because its driver is elsewhere: run this code on the driver."
        )
    if context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        raise LaunchError(
            "The ranks are tasks of a barrier stage, which Spark does not run with dynamic allocation. Start Spark "
            "with spark.dynamicAllocation.enabled=false."
        )
    return context


def count_slots(context: Any) -> int:
    """The number of tasks that run at the same time on the executors that are registered now."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def wait_for_slots(count: Callable[[], int], least: int, wanted: int, timeout_s: float, settle_s: float = 0.0) -> int:
    """Wait until there are slots for `wanted` ranks, or for `least` if there are no more after settle_s.

    count: the slots that there are now. Returns the number of ranks. Raises LaunchError after timeout_s.
    """
    began, told = time.monotonic(), False
    while True:
        slots, waited_s = count(), time.monotonic() - began
        if slots >= wanted or (slots >= least and waited_s >= settle_s):
            return min(slots, wanted)
        if waited_s >= timeout_s:
            raise LaunchError(
                f"{least} ranks need {least} tasks at the same time, but the executors of this Spark application have "
                f"room for {slots} (cores of all executors, divided by spark.task.cpus), after {waited_s:.0f} s. Lower "
                "num_proc, or start more executors."
            )
        if waited_s >= _SAY_AFTER_S and not told:
            logger.warning("waiting for executors: %d ranks, room for %d", least, slots)
            told = True
        time.sleep(_PAUSE_S)
