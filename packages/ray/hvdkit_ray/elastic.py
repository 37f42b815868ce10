"""The driver of elastic actors: it decides which are the ranks of the next world, and when that begins.

The driver has workers that are ranks (members) and workers that are not ranks yet (candidates); Ray may have no room
for some candidates yet. A world ends when a member is lost, or at a commit when candidates are ready. Its members then
wait for their next ranks, in the middle of their function. When all members wait, the members and the candidates that
are ready form the next world.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from hvdkit.errors import (
    DuplicateNameError,
    HorovodInternalError,
    LaunchError,
    LaunchTimeoutError,
    RankLostError,
    RanksDisagreeError,
)
from hvdkit.integrations.ranks import assign_ranks, new_secret, plan_variables
from hvdkit.log import logger
from hvdkit.optional_import import optional_import
from hvdkit_ray.actor import CONCURRENCY_GROUPS, CONTROL, ElasticRank
from hvdkit_ray.answers import Lost, find_dead, find_lost_candidates, find_lost_members
from hvdkit_ray.members import Worker, choose_members
from hvdkit_ray.settings import Demand, RaySettings
from hvdkit_ray.workers import first_line, is_death

ray = optional_import("ray")

#: Seconds between two checks of the nodes and the time limits.
_LOOK_S = 1.0
#: The first world begins when no worker has come for this many seconds, if the workers are enough.
_SETTLED_S = 5.0
#: Limit of workers in a row that fail before they are ranks or before their first commit, and of worlds in a row that
#: end without a change of workers.
_ATTEMPTS = 3


class ElasticWorkers:
    """The actors of an elastic job; see Workers.

    inside: do they use the placement group of this driver, if it has one?
    """

    def __init__(self, demand: Demand, settings: RaySettings, env: Mapping[str, str], *, inside: bool = True) -> None:
        self._demand, self._settings, self._inside = demand, settings, inside
        self._env = {**env, "HVDKIT_ELASTIC": "1"}
        self._members: list[Worker] = []
        self._candidates: list[Worker] = []
        self._made = self._failed = self._worlds = self._idle = self._new_lost = 0
        self._announced = self._changed = self._committed = self._has_lost_new = False
        self._last_came_s = time.monotonic()
        self._deadline: float | None = None
        self._why = ""
        self._fill()

    def _most(self) -> int:
        """Return the largest number of workers: as set, or as many as the nodes that are alive have room for."""
        if self._settings.max_workers is not None:
            return self._settings.max_workers
        room = 0
        for node in ray.nodes():
            if node["Alive"]:
                room += self._demand.count_room(node["Resources"])
        return max(room, self._settings.min_workers)

    def _fill(self) -> None:
        """Request actors from Ray up to the largest number of workers."""
        missing = self._most() - len(self._members) - len(self._candidates)
        for _ in range(missing if self._failed < _ATTEMPTS else 0):
            actor = (
                ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(ElasticRank)
                .options(
                    num_cpus=self._demand.cpus,
                    num_gpus=self._demand.gpus,
                    scheduling_strategy=None if self._inside else "DEFAULT",
                    runtime_env={"env_vars": self._env},
                )
                .remote(self._made)
            )
            self._candidates.append(Worker(self._made, actor, actor.arrive.remote()))
            self._made += 1

    def run(self, call: Callable[[Any], Any]) -> list[Any]:
        """See ElasticRayExecutor.run."""
        self._deadline = time.monotonic() + self._settings.timeout_s
        try:
            while True:
                self._look()
                self._find_lost()
                if self._members and all(worker.finished for worker in self._members):
                    return [worker.value for worker in sorted(self._members, key=lambda worker: worker.rank)]
                if self._is_due():
                    chosen = choose_members(self._members, self._candidates, self._most())
                    if self._all_live(chosen) and self._can_begin(chosen):
                        self._begin_world(chosen, call)
                elif self._deadline is not None and time.monotonic() > self._deadline:
                    self._give_up()
                self._fill()
        finally:
            self.close()

    def _look(self) -> None:
        """Wait for an event of a worker, and handle it."""
        watched = {
            ref: worker
            for worker in [*self._members, *self._candidates]
            for ref in (worker.arriving, worker.result)
            if ref is not None
        }
        if not watched:
            time.sleep(_LOOK_S)
            return
        done, _ = ray.wait(list(watched), num_returns=1, timeout=_LOOK_S)
        for ref in done:
            worker = watched[ref]
            if ref == worker.result:
                self._take_result(worker)
            elif worker in self._candidates:
                self._take_candidate(worker)
            else:
                self._take_arrival(worker)

    def _find_lost(self) -> None:
        """Remove workers that block the job."""
        self._remove_workers(find_lost_members(self._members, self._settings))
        self._remove_workers(find_lost_candidates(self._candidates, self._settings))

    def _remove_workers(self, lost: Lost) -> None:
        for worker, error in lost:
            if worker in self._members:
                self._lose(worker, error)
            else:
                self._drop(worker, error)

    def _take_candidate(self, worker: Worker) -> None:
        ref, worker.arriving = worker.arriving, None
        try:
            worker.arrival = ray.get(ref)
        except ray.exceptions.RayError as error:
            if not is_death(error) and not self._members:
                raise  # for example, torch is missing; an error of a new node does not end a running job
            self._drop(worker, error)
            return
        worker.place = worker.arrival.describe()
        self._failed, self._last_came_s, self._changed = 0, time.monotonic(), True
        first = next((each for each in self._members if each.rank == 0), None)
        if first is not None and not self._announced and len(self._members) < self._most():
            self._announced = True
            first.actor.announce.options(concurrency_group=CONTROL).remote(time.time())

    def _drop(self, worker: Worker, error: Exception) -> None:
        """Remove a candidate that has died or cannot be a rank."""
        self._candidates.remove(worker)
        self._end(worker)
        self._failed += 1
        what = f"{worker.name} has failed before it was a rank: {first_line(error)}"
        logger.warning("%s", what)
        if not self._worlds:
            self._why = what
        if self._failed >= _ATTEMPTS:
            self._check_enough(f"{self._failed} workers in a row have failed before they were ranks", error)

    def _check_enough(self, what: str, error: Exception | None) -> None:
        """Raise LaunchError if too few workers are left and no more are requested.

        error: of the last one that failed.
        """
        left, least = len(self._members) + len(self._candidates), self._settings.min_workers
        if left < least:
            last = self._why if error is None else first_line(error)
            raise LaunchError(
                f"{what}; {left} are left, and {least} are needed. See the workers' logs (`ray logs`). The last one: "
                f"{last}",
                code="ray-too-few-workers",
            ) from error

    def _take_arrival(self, worker: Worker) -> None:
        ref, worker.arriving = worker.arriving, None
        with contextlib.suppress(ray.exceptions.RayError):  # its result shows the error too
            worker.arrival = ray.get(ref)
        if worker.arrival is not None:
            self._why = worker.arrival.why
            self._committed |= worker.arrival.has_state
            self._end_world(worker)

    def _take_result(self, worker: Worker) -> None:
        ref, worker.result = worker.result, None
        try:
            worker.value, worker.finished = ray.get(ref), True
        except Exception as error:  # whatever the function raises
            if isinstance(error, (RanksDisagreeError, DuplicateNameError)):
                raise  # as it would in the next world
            if not is_death(error) and not isinstance(error, HorovodInternalError):
                raise
            self._lose(worker, error)
            return
        if self._deadline is not None:  # it has not noticed that the world ended, and the others wait for it
            raise RankLostError(
                f"The function has returned on rank {worker.rank}, without which the other ranks cannot go on from the "
                f"last commit. Why they were to: {self._why}"
            )

    def _lose(self, worker: Worker, error: Exception) -> None:
        self._members.remove(worker)
        self._changed = True
        self._has_lost_new |= worker.is_new
        if not worker.is_new:
            self._failed = 0
        self._why = f"{worker.name} is lost: {first_line(error)}"
        logger.warning("%s", self._why)
        self._end(worker)
        if all(each.finished for each in self._members):
            if not is_death(error) and not isinstance(error, RankLostError):
                raise error
            raise RankLostError(
                f"{worker.name.capitalize()} is lost, and no rank is left that could go on from the last commit: "
                f"{first_line(error)}"
            ) from error
        self._end_world(worker)

    def _end_world(self, worker: Worker) -> None:
        """End the world and set the time limit for the next one. worker: whose loss or arrival ended it."""
        finished = [each.rank for each in self._members if each.finished]
        if finished:
            raise RankLostError(
                f"Rank {worker.rank} cannot finish, because the function has already returned on rank(s) "
                f"{', '.join(map(str, sorted(finished)))}. {self._why}"
            )
        if self._deadline is None:
            self._deadline = time.monotonic() + self._settings.elastic_timeout
            for each in self._members:
                if each.arrival is None:  # it may be waiting for the other ranks to connect
                    each.actor.end_world.options(concurrency_group=CONTROL).remote(self._worlds - 1, self._why)

    def _is_due(self) -> bool:
        """Can the next world begin?"""
        if any(worker.arrival is None for worker in self._members):
            return False
        most = self._most()
        size = len(choose_members(self._members, self._candidates, most))
        if size < self._settings.min_workers:
            return False
        now = time.monotonic()
        late = now - self._last_came_s > _SETTLED_S or (self._deadline is not None and now > self._deadline)
        return bool(self._members) or size == most or late

    def _all_live(self, chosen: list[Worker]) -> bool:
        """Query all chosen workers; those that died or do not answer are lost.

        A node that dies takes several workers with it.
        """
        lost = find_dead(chosen, self._settings.elastic_timeout)
        self._remove_workers(lost)
        return not lost

    def _begin_world(self, chosen: list[Worker], call: Callable[[Any], Any]) -> None:
        offers = [worker.arrival.offer for worker in chosen if worker.arrival is not None]
        ranks = assign_ranks(offers)
        job = f"ray-{ray.get_runtime_context().get_job_id()}-{self._worlds}"
        variables = plan_variables(ranks, offers[0].address, offers[0].port, new_secret(), job)
        by_index = {worker.index: worker for worker in chosen}
        for place, own in zip(ranks, variables, strict=True):
            worker = by_index[place.index]
            worker.is_new = worker.rank < 0
            if worker.is_new:
                worker.result = worker.actor.take_part.remote(call, self._worlds, own)
            else:
                worker.actor.assign.options(concurrency_group=CONTROL).remote(self._worlds, own)
            worker.rank, worker.arrival = place.rank, None
            worker.begin()
            worker.arriving = worker.actor.next_arrival.options(concurrency_group=CONTROL).remote()
        if self._worlds:
            size = f"{len(chosen)} rank{'s' * (len(chosen) != 1)}"
            logger.warning("continuing with %s from the last commit: %s", size, self._why.rstrip("."))
        self._members = chosen
        self._candidates = [worker for worker in self._candidates if worker.rank < 0]
        self._worlds += 1
        self._deadline, self._announced, self._changed = None, False, False

    def _can_begin(self, chosen: list[Worker]) -> bool:
        """Return False if new workers have been ended because worlds with them have failed too often.

        Raises an error if another world would not help, or would exceed the reset limit.
        """
        if self._committed and not any(worker.has_state for worker in chosen):
            raise RankLostError(
                f"All workers that had the last commit are lost; {self._why} Start the job again, from a checkpoint if "
                "there is one."
            )
        limit = self._settings.reset_limit
        if limit is not None and self._worlds > limit:
            raise RankLostError(f"The ranks have changed {limit} times, which is the reset limit. {self._why}")
        if any(worker.arrival is not None and worker.arrival.committed for worker in self._members):
            self._failed = self._new_lost = 0
        elif self._has_lost_new:
            self._new_lost += 1
        self._idle = 0 if self._changed or not self._worlds else self._idle + 1
        self._has_lost_new, self._changed = False, True
        if max(self._idle, self._new_lost) < _ATTEMPTS:
            return True
        nobody_died = self._idle >= _ATTEMPTS
        have_state = [worker.has_state for worker in chosen]
        if not any(have_state) or (nobody_died and all(have_state)):
            how = "and no worker has died" if nobody_died else "each time with the loss of a new worker"
            raise HorovodInternalError(
                f"The ranks have failed {_ATTEMPTS} times in a row, {how}. Last error: {self._why}"
            )
        self._leave_out_new()
        return False

    def _leave_out_new(self) -> None:
        """Continue with the workers that have the last commit, and request no others until one of these is lost."""
        self._failed, self._idle, self._new_lost = _ATTEMPTS, 0, 0
        logger.warning("worlds with new workers have failed %d times in a row; going on without them", _ATTEMPTS)
        for worker in [each for each in (*self._members, *self._candidates) if not each.has_state]:
            (self._members if worker in self._members else self._candidates).remove(worker)
            self._end(worker)
        self._check_enough(f"Worlds with new workers have failed {_ATTEMPTS} times in a row", None)

    def _give_up(self) -> None:
        """End members that have not come, as the next world has not begun in time; fail if too few are left."""
        assert self._deadline is not None
        late = [worker for worker in self._members if worker.arrival is None]
        if late:
            self._deadline = None
            for worker in late:
                error = RankLostError(
                    f"It has not left the last world within {self._settings.elastic_timeout:g} s (elastic_timeout)."
                )
                self._lose(worker, error)
            return
        late = [worker for worker in self._candidates if worker.arrival is None]
        ready = len(self._members) + len(self._candidates) - len(late)
        text = f"{ready} workers are there, and {self._settings.min_workers} are needed."
        free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
        text += (
            f" {len(late)} others that Ray was asked for, with {self._demand.worker} each, have not started; free in "
            f"all: {free or 'nothing'}."
        )
        if not self._worlds:
            cure = f"Add nodes, ask for less, or raise timeout_s ({self._settings.timeout_s:g} s)."
            raise LaunchTimeoutError(f"{text} {cure} {self._why}".rstrip(), code="ray-no-room")
        raise RankLostError(
            f"{text} They have not come within {self._settings.elastic_timeout:g} s (elastic_timeout). {self._why}"
        )

    def close(self) -> None:
        for worker in [*self._members, *self._candidates]:
            self._end(worker)
        self._members, self._candidates = [], []

    def _end(self, worker: Worker) -> None:
        with contextlib.suppress(Exception):  # Ray itself may be down
            ray.kill(worker.actor)
