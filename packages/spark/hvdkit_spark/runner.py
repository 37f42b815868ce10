"""`hvdkit_spark.run(function, num_proc=4)`, as horovod.spark.run."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from hvdkit.errors import LaunchError
from hvdkit.integrations.ranks import check_call, new_secret
from hvdkit_spark.output import Output
from hvdkit_spark.reports import Report, read_results
from hvdkit_spark.session import count_slots, describe_loopback, find_context, wait_for_slots
from hvdkit_spark.task import RankSpec

#: Default limit in seconds, the same as Horovod's.
START_TIMEOUT_S = 600.0

#: Horovod's arguments that hvdkit refuses, with the reason.
_REFUSED = {
    "use_mpi": "MPI starts no processes on Spark's executors; ranks communicate over Gloo and shared memory",
    "use_gloo": "ranks communicate over Gloo and shared memory, and there is no other way",
    "extra_mpi_args": "MPI starts no processes on Spark's executors",
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
    """Call fn(*args, **kwargs) on ranks that are tasks of one barrier stage; returns the results, by rank.

    fn, its arguments and results are pickled with cloudpickle; it calls hvd.init(). Each rank is a process of its own,
    started by its task. Ranks on the same host have consecutive numbers.

    num_proc: number of ranks; None for as many as tasks run at the same time
    start_timeout: seconds until all ranks run; 600 if None
    use_gloo: None or True, as Gloo is always used
    env: variables of the ranks, added to the executors'
    stdout, stderr: files of the driver, such as sys.stdout, to which the lines of the ranks are written as well, each
        with its rank in front; None for the logs of the executors alone
    verbose: 2 for messages of level info
    nics: the first is the interface that Gloo uses
    prefix_output_with_timestamp: put the time in front of lines in stdout and stderr
    executable: the Python of the ranks
    The other arguments are Horovod's, and refused if they are set.
    Raises what fn raised on a rank, from a HorovodInternalError with its traceback; HorovodInternalError if a rank or
    an executor is lost; LaunchError for ranks that cannot be started.
    """
    job = read_arguments("run", locals())
    ranks = num_proc if num_proc is not None else max(1, count_slots(job.context))
    check_count("num_proc", ranks)
    job.wait(ranks, ranks, job.start_s)
    return read_results(job.start(ranks))


@dataclass(frozen=True)
class Job:
    """The arguments of run() and run_elastic().

    context: the active SparkContext.
    function: the function, pickled, with its arguments.
    env: variables of the ranks.
    start_s: start_timeout of run().
    executable: the Python of the ranks.
    output: the streams for lines of the ranks.
    """

    context: Any
    function: bytes
    env: dict[str, str]
    start_s: float
    executable: str
    output: Output

    @property
    def driver(self) -> str:
        """The host of the driver, as Spark reports it to executors."""
        return str(self.context.getConf().get("spark.driver.host") or "127.0.0.1")

    def wait(self, least: int, wanted: int, timeout_s: float, settle_s: float = 0.0) -> int:
        """See wait_for_slots."""
        unreachable = describe_loopback(self.driver, self.context.master)
        return wait_for_slots(lambda: count_slots(self.context), least, wanted, timeout_s, settle_s, unreachable)

    def start(self, ranks: int) -> list[Report]:
        """Run this number of ranks to their end; see job.run_job."""
        from hvdkit_spark.job import run_job  # needs pyspark

        secret = new_secret()
        with self.output.receive(self.driver, secret) as port:
            spec = RankSpec(
                function=self.function,
                env=self.env,
                secret=secret,
                name=f"hvdkit-spark-{uuid.uuid4().hex[:8]}",
                driver=self.driver,
                start_timeout=self.start_s,
                executable=self.executable,
                alias_horovod="hvdkit.alias_horovod" in sys.modules,
                output_port=port,
            )
            return run_job(self.context, spec, ranks, self.start_s)


def read_arguments(function: str, given: Mapping[str, Any]) -> Job:
    """Read the arguments that run() and run_elastic() share. given: all arguments of this call, by name.

    Raises LaunchError for arguments that hvdkit refuses, and without a SparkContext.
    """
    refuse(function, given)
    output = Output(given["stdout"], given["stderr"], bool(given["prefix_output_with_timestamp"]))
    output.check(function)
    call = check_call(given["fn"], given["args"], given["kwargs"])
    return Job(
        context=find_context(),
        function=cloudpickle.dumps((given["fn"], *call)),
        env=plan_env(given["env"], given["verbose"], given["nics"]),
        start_s=check_timeout("start_timeout", given["start_timeout"], START_TIMEOUT_S),
        executable=given["executable"] or "",
        output=output,
    )


def plan_env(env: Mapping[str, str] | None, verbose: int, nics: Sequence[str] | None) -> dict[str, str]:
    """Convert arguments of run() to variables of the ranks."""
    planned: dict[str, str] = {}
    if verbose >= 2:
        planned["HVDKIT_LOG_LEVEL"] = "info"
    if nics:
        planned["GLOO_SOCKET_IFNAME"] = nics if isinstance(nics, str) else str(next(iter(nics)))
    return {**planned, **{name: str(value) for name, value in (env or {}).items()}}


def refuse(function: str, given: Mapping[str, Any]) -> None:
    """Raise LaunchError for an argument of Horovod's that is set and that hvdkit refuses. given: see read_arguments."""
    for name, reason in _REFUSED.items():
        value = given.get(name)
        if value is False if name == "use_gloo" else value:
            raise LaunchError(
                f"hvdkit_spark.{function}({name}={value!r}) is not possible: {reason}. Leave it out.",
                code="spark-argument-refused",
            )


def check_count(name: str, value: int) -> None:
    """Raise LaunchError for a number of ranks below 1."""
    if value < 1:
        raise LaunchError(f"{name} is {value}; it must be 1 or more.", code="spark-number-invalid")


def check_timeout(name: str, value: float | None, default: float) -> float:
    """Return the seconds, or the default. Raises LaunchError for a negative number."""
    if value is not None and value < 0:
        raise LaunchError(f"{name} is {value}; it must be 0 seconds or more.", code="spark-number-invalid")
    return default if value is None else float(value)
