"""Health checks of an elastic job, which find the workers that block it.

The driver queries the workers while their functions run. See ElasticRank.answer(). The death of a worker is known by
its result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from hvdkit.errors import RankLostError
from hvdkit.optional_import import optional_import
from hvdkit_ray.members import Worker
from hvdkit_ray.settings import RaySettings

ray = optional_import("ray")

#: Seconds that waiting workers have to answer before they count as lost. Ray itself gives a node about as long.
_ANSWER_S = 30.0
#: Seconds between two queries of a worker.
_ASK_S = 60.0

Lost = list[tuple[Worker, Exception]]


def find_lost_members(members: Sequence[Worker], settings: RaySettings) -> Lost:
    """Find members that block the job: each with the error to report.

    A member is lost if it has not answered for elastic_timeout, or if others wait for it in hvd.init() for timeout_s.
    If no other member waits, a function may run without hvd.init() without limit.
    """
    limit_s, start_s = settings.elastic_timeout, settings.timeout_s
    running = [worker for worker in members if not worker.finished]
    late = _ask(running, start_s, min(_ASK_S, limit_s, start_s))
    others_wait = any(worker.has_entered or worker.arrival is not None for worker in members)
    lost: Lost = []
    for worker in running:
        if worker.asked is not None and time.monotonic() - worker.asked_s > limit_s:
            lost.append((worker, RankLostError(f"It has not answered for {limit_s:g} s (elastic_timeout).")))
        elif worker in late and worker.arrival is None and others_wait:
            error = RankLostError(
                f"It has not called hvd.init() within {start_s:g} s (timeout_s), where the others wait for it. See its "
                "log for the cause (`ray logs`). Have the function call hvd.init() first, or raise timeout_s."
            )
            lost.append((worker, error))
    return lost


def find_lost_candidates(candidates: Sequence[Worker], settings: RaySettings) -> Lost:
    """Find candidates whose processes run but are not ready after timeout_s.

    They wait for room in Ray without limit.
    """
    start_s = settings.timeout_s
    starting = [worker for worker in candidates if worker.arrival is None]
    text = f"Its process runs, and has not loaded torch within {start_s:g} s (timeout_s)."
    return [(worker, RankLostError(text)) for worker in _ask(starting, start_s, min(_ASK_S, start_s))]


def _ask(workers: Sequence[Worker], start_s: float, pause_s: float) -> list[Worker]:
    """Collect the answers that have come, and query the workers again after a pause.

    Returns the workers that had run for more than start_s at the query and had not called hvd.init().
    """
    asked = [worker.asked for worker in workers if worker.asked is not None]
    answered = ray.wait(asked, num_returns=len(asked), timeout=0)[0] if asked else []
    late, now = [], time.monotonic()
    for worker in workers:
        if worker.asked in answered:
            ref, worker.asked = worker.asked, None
            with contextlib.suppress(ray.exceptions.RayError):  # its result shows the error too
                worker.has_entered = ray.get(ref)
                worker.began_s = now if worker.began_s is None else worker.began_s
                if not worker.has_entered and worker.asked_s - worker.began_s > start_s:
                    late.append(worker)
        if worker.asked is None and now - worker.asked_s > pause_s:
            worker.asked, worker.asked_s = worker.ask(), now
    return late


def find_dead(chosen: Sequence[Worker], elastic_timeout: float) -> Lost:
    """Query all workers that wait for their ranks at once; returns those that have died or do not answer."""
    limit_s = min(_ANSWER_S, elastic_timeout)
    refs = [worker.ask() for worker in chosen]
    _, silent = ray.wait(refs, num_returns=len(refs), timeout=limit_s)
    lost: Lost = []
    for worker, ref in zip(chosen, refs, strict=True):
        error = RankLostError(f"It has not answered within {limit_s:g} s.") if ref in silent else _find_death(ref)
        if error is not None:
            lost.append((worker, error))
    return lost


def _find_death(ref: object) -> Exception | None:
    """Return the reason for the death of the actor that was to answer; None if it has answered."""
    try:
        ray.get(ref)
    except ray.exceptions.RayError as error:
        return error  # type: ignore[no-any-return]
    return None
