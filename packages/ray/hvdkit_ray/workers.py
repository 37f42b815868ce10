"""Actors as ranks: starts, connects and ends them together, and decides what the end of one means for the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from hvdkit.errors import HorovodInternalError, LaunchError, LaunchTimeoutError, RankLostError
from hvdkit.integrations.ranks import assign_ranks, new_secret, plan_variables
from hvdkit.optional_import import optional_import
from hvdkit_ray.actor import Arrival, Rank
from hvdkit_ray.placement import Reservation, reserve
from hvdkit_ray.settings import Demand, RaySettings
from hvdkit_ray.signs import HeartbeatMonitor

ray = optional_import("ray")
scheduling = optional_import("ray.util.scheduling_strategies")

#: Seconds for the other ranks to end by themselves after one has failed.
_GRACE_S = 10.0
_LONGEST = 600  # characters of an error of Ray's in an error of hvdkit's


class Workers:
    """The actors of an executor; ranks from connect() on.

    actors: by rank, once they are connected. env: variables of their processes, set before Python starts.
    """

    def __init__(self, demand: Demand, settings: RaySettings, given: Any, env: Mapping[str, str]) -> None:
        self.actors: list[Any] = []
        self._demand, self._settings = demand, settings
        self._places: list[str] = []  # of each rank, for messages
        self._numbers: list[int] = []  # of each rank: the number with which its worker was started
        self._signs = HeartbeatMonitor(settings.answer_timeout_s)
        self._reservation: Reservation | None = reserve(demand, given, settings.placement_group_timeout_s)
        try:
            self._start(env)
            self.connect()
        except BaseException:
            self.close()
            raise

    def _start(self, env: Mapping[str, str]) -> None:
        assert self._reservation is not None
        for index, bundle in enumerate(self._reservation.bundles):
            placed = scheduling.PlacementGroupSchedulingStrategy(self._reservation.group, bundle)
            self.actors.append(
                ray.remote(Rank)
                .options(
                    num_cpus=self._demand.cpus,
                    num_gpus=self._demand.gpus,
                    scheduling_strategy=placed,
                    runtime_env={"env_vars": dict(env)} if env else None,
                )
                .remote(index)
            )

    def connect(self) -> None:
        """Make the actors ranks of a new world: ordered by node, with a new store and secret."""
        assert self._reservation is not None
        if not self._numbers:
            for number, actor in enumerate(self.actors):
                actor.send_heartbeats.remote(self._signs.key(number), self._signs.pause_s)
        refs = [actor.arrive.remote() for actor in self.actors]
        came: list[Arrival] = self._answers(refs, self._reservation.describe)
        arrivals = {arrival.offer.index: arrival for arrival in came}
        actors = {arrival.offer.index: actor for arrival, actor in zip(came, self.actors, strict=True)}
        ranks = assign_ranks([arrivals[index].offer for index in sorted(arrivals)])
        self._check_hosts([rank.local_size for rank in ranks])
        first = arrivals[ranks[0].index].offer
        job = f"ray-{ray.get_runtime_context().get_job_id()}"
        variables = plan_variables(ranks, first.address, first.port, new_secret(), job)
        self.actors = [actors[rank.index] for rank in ranks]
        self._places = [arrivals[rank.index].describe() for rank in ranks]
        self._numbers = [rank.index for rank in ranks]
        entered = [actor.enter.remote(own) for actor, own in zip(self.actors, variables, strict=True)]
        self._answers(entered, self._name)

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._places[rank]})"

    def _answers(self, refs: Sequence[Any], name: Callable[[int], str]) -> list[Any]:
        """Return the workers' answers within timeout_s. Raises LaunchError that names a dead or silent worker."""
        _, late = ray.wait(refs, num_returns=len(refs), timeout=self._settings.timeout_s)
        answers = []
        for number, ref in enumerate(refs):
            try:
                answers.append(None if ref in late else ray.get(ref))
            except Exception as error:  # noqa: PERF203 (also what the worker raises)
                if not is_death(error):
                    raise
                raise LaunchError(
                    f"A worker has died before the ranks could connect, {name(number)}: {first_line(error)} See its "
                    "log for the cause (`ray logs`).",
                    code="ray-worker-died",
                ) from error
        if late:
            missing = ", ".join(name(number) for number, ref in enumerate(refs) if ref in late)
            raise LaunchTimeoutError(
                f"{len(late)} of {len(refs)} workers have not answered within {self._settings.timeout_s:g} s: "
                f"{missing}. See their nodes in `ray status`, or raise timeout_s.",
                code="ray-workers-late",
            )
        return answers

    def _check_hosts(self, local_sizes: Sequence[int]) -> None:
        each = self._demand.workers // self._demand.hosts if self._demand.hosts else 0
        if each and set(local_sizes) != {each}:
            raise LaunchError(
                f"{self._demand.hosts} hosts with {each} workers each were asked for, but the placement group has put "
                f"them otherwise: by rank, the workers of its host are {list(local_sizes)}. Give a group with one "
                "bundle a host (STRICT_SPREAD), or use_current_placement_group=False.",
                code="ray-placement-group-uneven",
            )

    def collect(self, refs: Sequence[Any]) -> list[Any]:
        """Return the results of the ranks, by rank. refs: one of each rank, in their order.

        If one fails, the others have some seconds to end. If all actors live and have ended, they become the ranks of a
        new world; otherwise all are ended. Then raises RankLostError that names the actors that have died, or the
        function's own error.
        """
        pending, failures = list(refs), dict[int, Exception]()
        deadline = None
        self._signs.begin()
        while pending:
            left = self._signs.pause_s if deadline is None else max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, num_returns=1, timeout=left)
            if not done and deadline is None:
                self._end_silent([refs.index(ref) for ref in pending])
                continue
            if not done:
                break
            try:
                ray.get(done[0])
            except Exception as error:  # whatever the function raises
                failures[refs.index(done[0])] = error
                deadline = deadline or time.monotonic() + _GRACE_S
        if failures:
            self._raise(failures, all_ended=not pending)
        return list(ray.get(list(refs)))

    def _end_silent(self, ranks: Sequence[int]) -> None:
        """Raise RankLostError, after all actors are ended, if one of these ranks gives no sign of life any more."""
        silent = self._signs.find_dead([self._numbers[rank] for rank in ranks])
        which = [(rank, silent[self._numbers[rank]]) for rank in ranks if self._numbers[rank] in silent]
        if not which:
            return
        seen = " and ".join(f"{self._name(rank)} {seconds:.0f} s ago" for rank, seconds in which)
        size = len(self._places)
        self.close()
        raise RankLostError(
            f"No sign of life for {self._signs.limit_s:g} s (answer_timeout_s); last seen: {seen}. Such a process is "
            "stopped (SIGSTOP, a debugger, a frozen container), or in code that keeps Python's lock for so long. All "
            f"{size} workers are ended. Look at its node, or raise answer_timeout_s in create_settings()."
        )

    def _raise(self, failures: Mapping[int, Exception], *, all_ended: bool) -> NoReturn:
        died = {rank: error for rank, error in failures.items() if is_death(error)}
        own = {rank: error for rank, error in failures.items() if not isinstance(error, HorovodInternalError)}
        places = list(self._places)
        if died or not all_ended:
            self.close()
        else:
            try:
                self.connect()
            except Exception:  # the function's own error is more useful
                self.close()
        if died:
            error = next(iter(died.values()))
            which = " and ".join(f"rank {rank} ({places[rank]})" for rank in died)
            raise RankLostError(
                f"{which[0].upper()}{which[1:]} died: {first_line(error)} All {len(places)} workers are ended. See "
                "its log for the cause (`ray logs`)."
            ) from error
        raise next(iter((own or failures).values()))

    def close(self) -> None:
        """End all actors, and remove the placement group if it was made for them; harmless if done before."""
        actors, self.actors = self.actors, []
        for actor in actors:
            with contextlib.suppress(Exception):  # Ray itself may be down
                ray.kill(actor)
        self._signs.close()
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.release()


def is_death(error: Exception) -> bool:
    """Has the called actor died? False for the death of an actor that the called function has used."""
    exceptions = ray.exceptions
    deaths = exceptions.RayActorError, exceptions.OutOfMemoryError  # the second: by Ray's memory monitor
    return isinstance(error, deaths) and not isinstance(error, exceptions.RayTaskError)


def first_line(error: Exception) -> str:
    """Shorten an error of Ray's to one line; for an error of a worker, its text without the traceback."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    return " ".join(str(cause).split()).partition(" Some common causes")[0][:_LONGEST]
