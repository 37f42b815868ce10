"""Worlds that shrink and grow: the surviving ranks continue, start replacements and add them to the world."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from hvdkit.config import Config
from hvdkit.elastic.replacing import HostSlot, plan_replacements
from hvdkit.elastic.saver import Saver
from hvdkit.elastic.state import State
from hvdkit.engine import runtime as engine
from hvdkit.engine.job_objects import allgather_object
from hvdkit.errors import (
    HorovodInternalError,
    Preempted,
    RankLostError,
    RanksDisagreeError,
    StateLostError,
    TooFewRanksError,
    TransportError,
)
from hvdkit.launcher_channel import CHANGING, FAILED, FIRST_AWAITED, READY, TRAINED, notify_launcher, on_message
from hvdkit.log import logger
from hvdkit.transport.backend import Membership, PendingRanks

#: Limit of consecutive attempts to start ranks of which none joins.
_ATTEMPTS = 3


class _RankState(NamedTuple):
    """The state that each rank sends to all ranks when a new world begins.

    place: both numbers are 0 for a replacement. has_state: the rank has the last commit. number: number of the next
    rank to be started. attempts: failed attempts in a row.
    """

    place: HostSlot
    has_state: bool
    number: int
    attempts: int


class UlfmResizing:
    """See Changes. Ranks that died are replaced, up to config.max_np; a failed start is repeated a few times."""

    def __init__(self, config: Config, members: Membership) -> None:
        self._members = members
        self._min, self._max, self._directory = max(1, config.min_np), config.max_np, config.elastic_checkpoints
        self._channel = config.launcher_channel
        self._starting: dict[str, Any] = json.loads(config.elastic_command or "{}")
        self._newcomers: PendingRanks | None = None
        self._attempts = 0
        self._failed: set[int] = set()
        on_message(FAILED, self._note_failed)
        world = engine.runtime("elastic.run").world
        self._several_hosts = world.cross_size != 1
        self._state: State | None = None
        self._has_state = not members.changed()
        ranks = self._max if world.cross_size == 1 else world.local_size or 1
        slots = max(ranks, config.host_slots)
        self._place = HostSlot(world.host, 0, 0) if members.changed() else HostSlot(world.host, ranks, slots)
        self._save_s = config.elastic_save_s
        self._saver: Saver | None = None

    def begin(self, state: State) -> None:
        """See Changes. Continues from the newest checkpoint, if one exists."""
        self._state = state
        if self._directory and not self._members.changed():
            state.load_from(self._directory)
        if self._directory:
            self._saver = Saver(state, self._directory, self._save_s)

    def agree(self) -> None:
        """See Changes. Starts replacements for ranks that died.

        If no rank has the last commit, loads the newest checkpoint. Raises StateLostError if none exists.
        """
        mine = _RankState(self._place, self._has_state, int(self._starting.get("number", 0)), self._attempts)
        all_ranks = allgather_object(mine, name="elastic.rank_state")
        # New ranks have higher numbers than older ranks: if any rank has the commit, rank 0 has it.
        if not all_ranks[0].has_state and not self._load_again():
            raise StateLostError
        self._place = max(rank.place for rank in all_ranks if rank.place.host == self._place.host)
        if self._members.changed():
            self._replace(all_ranks)

    def _load_again(self) -> bool:
        if self._state is None or not self._directory or not self._state.load_from(self._directory):
            return False
        if self._members.rank() == 0:
            logger.warning("all ranks that had the last commit have died; continuing from %s.", self._directory)
        return True

    def synchronized(self) -> None:
        self._has_state = True

    def restart(self, *, lost: HorovodInternalError | None) -> None:
        """See Changes. Starts again if ranks die meanwhile."""
        notify_launcher(CHANGING, self._channel)
        while True:
            try:
                if lost is None:
                    self._take_in()
                else:
                    self._go_on(lost)
                return
            except HorovodInternalError as error:  # noqa: PERF203 (each attempt takes long)
                if error is lost:
                    raise
                lost = error

    def _go_on(self, lost: HorovodInternalError) -> None:
        """Shrink the world to the surviving ranks."""
        self._give_up()
        self._members.interrupt()
        before = self._members.size()
        with self._members.changing():
            engine.restart(functools.partial(self._shrink, lost), idle=False)
        size, first = self._members.size(), self._members.rank() == 0
        if first:  # the previous rank 0, which would have notified hvdrun, may have died
            notify_launcher(f"{FIRST_AWAITED}{self._starting.get('number', 0)}", self._channel)
        if size < self._min:
            self._stop(size, lost)
        if first:
            logger.warning("continuing with %d of %d ranks from the last commit: %s", size, before, lost)
        self._attempts = 0

    def _give_up(self) -> None:
        if self._newcomers is not None:
            self._newcomers.give_up()
            self._newcomers = None

    def _shrink(self, lost: HorovodInternalError) -> None:
        """Shrink the communicator; raise `lost` on all ranks if none has died, because the error would occur again.

        If ranks disagree, the first rank to notice revokes the communicator in which the others wait. Those see only
        the revocation, so all ranks agree here on whether it was a disagreement.
        """
        if self._members.shrink():
            return
        agree = self._members.is_so_on_all(not isinstance(lost, RanksDisagreeError))
        if not agree:
            # A rank may get the result, raise and end before the result has reached the others, which would then take
            # the disagreement for a death. So no rank leaves before all have the result.
            with contextlib.suppress(RankLostError):
                self._members.is_so_on_all(True)
        if not isinstance(lost, RankLostError):
            raise lost
        if not agree:
            raise lost from RanksDisagreeError(
                "No rank has died: the ranks disagree. See the output of the other ranks for the difference."
            )

    def _replace(self, all_ranks: Sequence[_RankState]) -> None:
        """Start as many ranks as are missing and have a slot, unless starts have failed too often."""
        missing = self._max - len(all_ranks)
        if missing <= 0 or not self._starting or max(rank.attempts for rank in all_ranks) >= _ATTEMPTS:
            return
        counts = plan_replacements([rank.place for rank in all_ranks], missing)
        first = max(rank.number for rank in all_ranks)  # not all ranks took part in every start
        after = self._starting["number"] = first + sum(counts)
        if first == after:
            return
        host = self._place.host
        starter = next(rank for rank, state in enumerate(all_ranks) if state.place.host == host)
        self._attempts += 1
        with self._members.changing():
            self._newcomers = self._members.start_ranks(
                self._make_command(first + sum(counts[:starter])),
                counts,
                first=starter,
                host=host if self._several_hosts else "",
                ready=self._notify_state,
                died=lambda: not self._failed.isdisjoint(range(first, after)),
            )

    def _make_command(self, number: int) -> list[str]:
        starting = self._starting
        like = ("--like", str(starting["process"]))
        return [*starting["agent"], "--joins", str(number), *like, "--", *starting["command"]]

    def _note_failed(self, number: str) -> None:
        if number.isdecimal():
            self._failed.add(int(number))

    def _stop(self, size: int, lost: HorovodInternalError) -> NoReturn:
        if self._saver is None or self._state is None:
            raise TooFewRanksError(size, self._min)
        self._state.sync()
        self._saver.save_now()
        if self._members.rank() == 0:
            logger.warning(
                "%d ranks are left, but at least %d are needed (--min-np). The last commit was saved in %s. Run the "
                "same command again to continue. %s",
                *(size, self._min, self._directory, lost),
            )
        raise Preempted

    def _notify_state(self, when: float) -> None:
        if self._state is not None:
            self._state.on_hosts_updated(when, 2)

    def _take_in(self) -> None:
        if self._newcomers is None:
            raise TransportError("New ranks were announced, but this rank has started none.")
        newcomers, before = self._newcomers, self._members.size()
        starters = allgather_object(newcomers.starters, name="elastic.came")[0]
        if not starters:
            self._stop_waiting()
            return
        with self._members.changing():
            engine.restart(lambda: newcomers.take_in(starters))
        self._give_up()
        size = self._members.size()
        if self._members.rank() == 0:
            logger.warning(
                "continuing with %d ranks, %d of them replacements for ranks that died.", size, size - before
            )
        self._attempts = 0

    def _stop_waiting(self) -> None:
        """Stop waiting for the ranks that were started, because none of them will join."""
        self._give_up()
        first = self._members.rank() == 0
        if first:
            notify_launcher(f"{FIRST_AWAITED}{self._starting['number']}", self._channel)
        if self._attempts >= _ATTEMPTS and first:
            logger.warning(
                "%d attempts in a row to start replacements for lost ranks have failed; continuing with %d ranks. "
                "See the output of the new ranks for the cause.",
                *(self._attempts, self._members.size()),
            )
        notify_launcher(READY, self._channel)

    def end(self, state: State, *, well: bool) -> None:
        self._state = None
        if self._newcomers is not None:
            self._newcomers.forget()
        if self._saver is not None:
            self._saver.close(well=well)
        if well:
            notify_launcher(TRAINED, self._channel)  # hvdrun then ends ranks that have not joined the world
