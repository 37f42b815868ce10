"""`hvdkit.spark.run(function, num_proc=4)`, as horovod.spark.run."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from hvdkit.errors import LaunchError
from hvdkit.integrations.ranks import new_secret
from hvdkit.spark.reports import Report, read_results
from hvdkit.spark.session import count_slots, find_context, wait_for_slots
from hvdkit.spark.task import RankSpec

#: Seconds, as Horovod's.
START_TIMEOUT_S = 600.0

_REFUSED = {
    "use_mpi": "MPI starts no processes on Spark's executors; ranks communicate over Gloo and shared memory",
    "extra_mpi_args": "MPI starts no processes on Spark's executors",
    "stdout": "the output of ranks is in the logs of their executors",
    "stderr": "the output of ranks is in the logs of their executors",
    "prefix_output_with_timestamp": "the lines of ranks have their number in front",
}


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call fn(*args, **kwargs) on ranks that are tasks of one barrier stage; returns what each returned, by rank.

    fn, its arguments and results are pickled with cloudpickle; it calls hvd.init(). Each rank is a process of its own,
    started by its task. Ranks of a host follow each other.
    num_proc: ranks; None for as many as tasks run at the same time. start_timeout: seconds until all of them run; 600
    if None. env: variables of the ranks, added to the executors'. verbose: 2 for messages of level info. nics: the
    first is the interface that Gloo uses. executable: the Python of the ranks. use_gloo: accepted, as it is always so.
    The other arguments are Horovod's, and refused if they are set.
    Raises what fn raised on a rank, from a HorovodInternalError with its traceback; HorovodInternalError if a rank or
    an executor is lost; LaunchError for ranks that cannot be started.
    """
    given = {"use_mpi": use_mpi, "extra_mpi_args": extra_mpi_args, "stdout": stdout, "stderr": stderr}
    refuse("run", {**given, "prefix_output_with_timestamp": prefix_output_with_timestamp})
    context = find_context()
    timeout_s = check_timeout("start_timeout", start_timeout, START_TIMEOUT_S)
    ranks = num_proc if num_proc is not None else max(1, count_slots(context))
    check_count("num_proc", ranks)
    wait_for_slots(lambda: count_slots(context), ranks, ranks, timeout_s)
    spec = make_spec(context, fn, args, kwargs, plan_env(env, verbose, nics), timeout_s, executable or "")
    return read_results(start_job(context, spec, ranks, timeout_s))


def start_job(context: Any, spec: RankSpec, ranks: int, start_timeout: float) -> list[Report]:
    """See job.run_job, which needs pyspark."""
    from hvdkit.spark.job import run_job

    return run_job(context, spec, ranks, start_timeout)


def make_spec(
    context: Any,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    env: dict[str, str],
    start_timeout: float,
    executable: str,
) -> RankSpec:
    """What the ranks of a new job get."""
    return RankSpec(
        function=cloudpickle.dumps((fn, tuple(args), dict(kwargs or {}))),
        env=env,
        secret=new_secret(),
        name=f"hvdkit-spark-{uuid.uuid4().hex[:8]}",
        driver=context.getConf().get("spark.driver.host") or "127.0.0.1",
        start_timeout=start_timeout,
        executable=executable,
        alias_horovod="hvdkit.alias_horovod" in sys.modules,
    )


def plan_env(env: Mapping[str, str] | None, verbose: int, nics: Sequence[str] | None) -> dict[str, str]:
    """The variables that the arguments of run() stand for."""
    planned: dict[str, str] = {}
    if verbose >= 2:
        planned["HVDKIT_LOG_LEVEL"] = "info"
    if nics:
        planned["GLOO_SOCKET_IFNAME"] = nics if isinstance(nics, str) else str(next(iter(nics)))
    return {**planned, **{name: str(value) for name, value in (env or {}).items()}}


def refuse(function: str, arguments: Mapping[str, Any]) -> None:
    """Raise LaunchError for an argument of Horovod's that is set and cannot be followed."""
    for name, value in arguments.items():
        if value:
            raise LaunchError(f"hvdkit.spark.{function}({name}=...) is not possible: {_REFUSED[name]}. Leave it out.")


def check_count(name: str, value: int) -> None:
    """Raise LaunchError for a number of ranks below 1."""
    if value < 1:
        raise LaunchError(f"{name} is {value}; it must be 1 or more.")


def check_timeout(name: str, value: float | None, default: float) -> float:
    """The seconds, or the default. Raises LaunchError for a negative number."""
    if value is not None and value < 0:
        raise LaunchError(f"{name} is {value}; it must be 0 seconds or more.")
    return default if value is None else float(value)
