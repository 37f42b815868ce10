"""The Spark application of this process: its context, and how many tasks it can run at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hvdkit.errors import LaunchError, LaunchTimeoutError
from hvdkit.log import logger
from hvdkit.optional_import import optional_import
from hvdkit.transport.addresses import is_loopback

_PAUSE_S = 0.5
_SAY_AFTER_S = 5.0
_UNREACHABLE_S = 30.0  # wait for executors if only the driver's own host can reach it


def find_context() -> Any:
    """Find the active SparkContext. Raises LaunchError if there is none, or if it cannot run a barrier stage."""
    context = optional_import("pyspark").SparkContext._active_spark_context
    if context is None:
        raise LaunchError(
            "There is no active SparkContext in this process. Create one first: SparkSession.builder.getOrCreate(). A "
            "session of Spark Connect has none, because its driver is elsewhere: run this code on the driver.",
            code="spark-no-context",
        )
    if context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        raise LaunchError(
            "The ranks are tasks of a barrier stage, which Spark does not run with dynamic allocation. Start Spark "
            "with spark.dynamicAllocation.enabled=false.",
            code="spark-dynamic-allocation",
        )
    return context


def count_slots(context: Any) -> int:
    """Count the tasks that can run at the same time on the executors that are registered now."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def describe_loopback(driver: str, master: str) -> str:
    """Explain why executors on other hosts cannot connect, with the cure.

    Returns "" if all executors run on this host, or if the driver can be reached. driver: spark.driver.host.
    """
    if master.startswith("local") or not (driver in ("localhost", "::1", "[::1]") or is_loopback(driver)):
        return ""
    return (
        f" spark.driver.host is {driver!r}, which is each host's own address, so executors on other hosts do not find "
        "the driver. Start Spark with spark.driver.host=ADDRESS, by which all executors reach the driver, and "
        "spark.driver.bindAddress=0.0.0.0 if this host does not have that address itself."
    )


def wait_for_slots(
    count: Callable[[], int], least: int, wanted: int, timeout_s: float, settle_s: float = 0.0, unreachable: str = ""
) -> int:
    """Wait for slots for `wanted` ranks, or after a time for at least `least` ranks.

    count: function that counts the slots of this moment.
    least: number of ranks that is enough after that time.
    wanted: number of ranks.
    timeout_s: limit of the wait in seconds.
    settle_s: that time in seconds.
    unreachable: see describe_loopback(); if not "", the whole wait is 30 s at most, or that time if it is longer.
    Returns the number of ranks. Raises LaunchTimeoutError after timeout_s.
    """
    began, told = time.monotonic(), False
    if unreachable:
        timeout_s = min(timeout_s, max(_UNREACHABLE_S, settle_s))
    while True:
        slots, waited_s = count(), time.monotonic() - began
        if slots >= wanted or (slots >= least and waited_s >= settle_s):
            return min(slots, wanted)
        if waited_s >= timeout_s:
            raise LaunchTimeoutError(
                f"{least} ranks need {least} tasks at the same time, but the executors of this Spark application have "
                f"room for {slots} (cores of all executors, divided by spark.task.cpus), after {waited_s:.0f} s. Lower "
                f"num_proc, or start more executors.{unreachable}",
                code="spark-no-room",
            )
        if waited_s >= _SAY_AFTER_S and not told:
            logger.warning("waiting for executors: %d ranks, room for %d.%s", least, slots, unreachable)
            told = True
        time.sleep(_PAUSE_S)
