"""The liveness of this host's ranks: each holds a record lock that the system releases when the process ends.

A record lock ends with its process however that dies, works across process namespaces, and is not handed on to a
forked child (a DataLoader worker, say), so it cannot outlive the rank.
"""

from __future__ import annotations

import copy
import fcntl
from collections.abc import Collection

from hvdkit.errors import RankLostError
from hvdkit.transport.api import Transport
from hvdkit.transport.shared.segment import open_segment
from hvdkit.transport.small_collectives import gather_ints
from hvdkit.world import describe_death, describe_leaving

#: Of a rank: it runs, it has shut hvdkit down, it knows of a rank that has died and may end for that.
_RUNNING, _LEFT, _TOLD = 0, 1, 2


class Liveness:
    """The ranks of one host as seen by each other; made by all of them together.

    global_rank: of this process in the whole world, for messages. job_rank: see World.
    """

    def __init__(
        self, group: Transport, host: str, directory: str, global_rank: int, job_rank: int | None = None
    ) -> None:
        self._host = host
        self._rank = group.rank
        self._ranks = gather_ints(group, global_rank)
        job_ranks = gather_ints(group, -1 if job_rank is None else job_rank)
        self._job_ranks = {rank: number for rank, number in zip(self._ranks, job_ranks, strict=True) if number >= 0}
        self._states = open_segment(group, [64 * group.size] + [0] * (group.size - 1), directory)
        # A file of its own: closing any descriptor of a file, as munmap does, drops this process's locks on it.
        self._locks = open_segment(group, [group.size] + [0] * (group.size - 1), directory)
        fcntl.lockf(self._locks.descriptor, fcntl.LOCK_EX, 1, self._rank)
        group.barrier()
        self._peers = [peer for peer in range(group.size) if peer != self._rank]
        self._is_part = False

    def of(self, ranks: Collection[int]) -> Liveness:
        """The same, of those that are among these ranks of the world: what it takes is this one's. Not collective."""
        part = copy.copy(self)
        part._peers = [peer for peer in self._peers if self._ranks[peer] in ranks]
        part._is_part = True
        return part

    def check(self) -> None:
        """Raise RankLostError if a rank of this host has ended or has shut hvdkit down.

        Of several it names one that nobody's loss made end: ranks that were told of one may be gone by now as well.
        """
        left, told = [], []
        for peer in self._peers:
            rank = self._ranks[peer]
            state = self._states.memory[64 * peer]
            if state == _LEFT:
                left.append(rank)
            elif self._is_gone(peer):
                if state != _TOLD:
                    raise self._lost(rank)
                told.append(rank)
        if told:
            raise self._lost(told[0])
        if left:  # told after a death, which may be why they left
            job_rank = self._job_ranks.get(left[0])
            raise RankLostError(describe_leaving(left[0], self._host, self._ranks[self._rank], job_rank))

    def _is_gone(self, peer: int) -> bool:
        try:
            fcntl.lockf(self._locks.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, peer)
        except OSError:
            return False
        fcntl.lockf(self._locks.descriptor, fcntl.LOCK_UN, 1, peer)
        return True

    def _lost(self, rank: int) -> RankLostError:
        if self._states.memory[64 * self._rank] == _RUNNING:
            self._states.memory[64 * self._rank] = _TOLD
        return RankLostError(describe_death(rank, self._host, self._job_ranks.get(rank)))

    def leave(self) -> None:
        """Tell those who wait for this rank, now or later, that it will not come; in any group."""
        if self._states.memory.size:
            self._states.memory[64 * self._rank] = _LEFT

    def close(self) -> None:
        """Leave, and let go of the memory; a part leaves that to the whole."""
        if self._is_part:
            return
        self.leave()
        self._locks.close()
        self._states.close()
