"""`hvdkit_spark.run_elastic`: the loss of a rank ends the job, which starts again from the last commit on a disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.log import logger
from hvdkit_spark.reports import Report, describe_failure, find_cause, raise_failure, read_results
from hvdkit_spark.runner import START_TIMEOUT_S, check_count, check_timeout, read_arguments
from hvdkit_spark.session import count_slots

#: Seconds to wait for lost executors before fewer ranks go on than before.
_SETTLE_S = 10.0
_RESTARTS = 10  # for reset_limit=None

_CHECKPOINTS = "HVDKIT_ELASTIC_CHECKPOINTS"


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    checkpoints: str | None = None,
    executable: str | None = None,
) -> list[Any]:
    """Call fn as run() does, and again when a rank or an executor is lost; returns the results, by rank.

    In fn, a function decorated with `hvd.elastic.run` continues from its state's last commit that was saved. All ranks
    start again: the ranks that are left cannot continue by themselves, because that needs MPI.

    num_proc: number of ranks at the start; None for max_num_proc, or as many as tasks run at the same time
    min_num_proc: number of ranks that are enough to start again; None for num_proc
    max_num_proc: largest number of ranks; None for num_proc
    elastic_timeout: seconds to wait for executors before a restart; 600 if None
    reset_limit: largest number of restarts; 10 if None
    min_np, max_np: older names of min_num_proc and max_num_proc
    checkpoints: directory of the commits, which all executors must see; HVDKIT_ELASTIC_CHECKPOINTS in `env` is the same
    The other arguments are those of run().
    Raises what run() raises, when fn raises an exception that is not HorovodInternalError or after the last restart.
    """
    job = read_arguments("run_elastic", locals())
    job = replace(job, env=plan_elastic_env(job.env, checkpoints))
    elastic_s = check_timeout("elastic_timeout", elastic_timeout, START_TIMEOUT_S)
    first, least, most = plan_sizes(
        num_proc, _either(min_num_proc, min_np), _either(max_num_proc, max_np), count_slots(job.context)
    )

    def attempt(restarts: int) -> list[Report]:
        again = restarts > 0
        return job.start(job.wait(least, most, elastic_s, _SETTLE_S) if again else job.wait(first, first, job.start_s))

    return read_results(repeat(attempt, _RESTARTS if reset_limit is None else reset_limit))


def repeat(attempt: Callable[[int], list[Report]], limit: int) -> list[Report]:
    """Make attempts until one succeeds without a loss, at most `limit` after the first; returns its reports.

    attempt: takes the number of restarts so far. Raises the failure of the last attempt.
    """
    restarts = 0
    while True:
        reports = attempt(restarts)
        cause = find_cause(reports)
        if cause is None or cause.status in ("raised", "not started"):
            return reports
        if restarts >= limit:
            logger.error("not started again: it was restarted %d times, the limit (reset_limit).", restarts)
            raise_failure(cause)
        restarts += 1
        logger.warning("starting the job again (restart %d): %s", restarts, describe_failure(cause))


def plan_elastic_env(env: Mapping[str, str], checkpoints: str | None) -> dict[str, str]:
    """Return the variables by which `hvd.elastic.run` saves commits and continues from them.

    Raises LaunchError without a directory.
    """
    directory = checkpoints or env.get(_CHECKPOINTS, "")
    if not directory:
        raise LaunchError(
            "run_elastic() restarts the job from its last commit, so commits must be saved where all executors see "
            f"them. Set checkpoints='/shared/folder', or {_CHECKPOINTS} in env.",
            code="spark-needs-checkpoints",
        )
    return {**env, "HVDKIT_ELASTIC": "1", "HVDKIT_ELASTIC_RESTARTS": "1", _CHECKPOINTS: directory}


def plan_sizes(wanted: int | None, least: int | None, most: int | None, slots: int) -> tuple[int, int, int]:
    """Return the numbers of ranks: at the start, at least after a loss, at most.

    wanted: num_proc.
    least: min_num_proc.
    most: max_num_proc.
    slots: number of slots now.
    Raises LaunchError if they contradict each other.
    """
    first = wanted if wanted is not None else most if most is not None else max(slots, least or 1)
    fewest, largest = least if least is not None else first, most if most is not None else first
    for name, value in (("num_proc", first), ("min_num_proc", fewest), ("max_num_proc", largest)):
        check_count(name, value)
    if not fewest <= first <= largest:
        raise LaunchError(
            f"run_elastic() needs min_num_proc <= num_proc <= max_num_proc, but they are {fewest}, {first}, {largest}.",
            code="spark-numbers-contradict",
        )
    return first, fewest, largest


def _either(value: int | None, older: int | None) -> int | None:
    return value if value is not None else older
