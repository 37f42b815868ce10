"""Detects the end of this host's ranks: each rank holds a record lock that the kernel releases when the process ends.

A record lock ends with its process however it dies, works across process namespaces, and is not inherited by a forked
child (for example a DataLoader worker), so it cannot outlive the rank.
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

#: States of a rank: running; has shut hvdkit down; has detected a dead rank, and may end for that reason.
_RUNNING, _LEFT, _TOLD = 0, 1, 2


class Liveness:
    """Detects ended ranks of one host; all of them make it together.

    group: transport of the ranks of this host.
    host: name of this host, for messages.
    directory: a memory file system that these ranks share.
    global_rank: this process's rank in the whole world, for messages.
    job_rank: see World.
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
        # A separate file: closing any descriptor of a file, as munmap does, drops this process's locks on it.
        self._locks = open_segment(group, [group.size] + [0] * (group.size - 1), directory)
        fcntl.lockf(self._locks.descriptor, fcntl.LOCK_EX, 1, self._rank)
        group.barrier()
        self._peers = [peer for peer in range(group.size) if peer != self._rank]
        self._is_part = False

    def of(self, ranks: Collection[int]) -> Liveness:
        """Return a Liveness for those of these world ranks on this host; it shares all resources. Not collective."""
        part = copy.copy(self)
        part._peers = [peer for peer in self._peers if self._ranks[peer] in ranks]
        part._is_part = True
        return part

    def check(self) -> None:
        """Raise RankLostError if a rank of this host has ended or has shut hvdkit down.

        Of several dead ranks it names one that had not detected a death itself: the others may have ended because of
        that death.
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
        if left:  # after deaths, which may be the reason why these ranks left
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
        """Announce that this rank leaves, to all ranks that wait for it now or later, in any group."""
        if self._states.memory.size:
            self._states.memory[64 * self._rank] = _LEFT

    def close(self) -> None:
        """Leave, and release the memory; does nothing for an object of of()."""
        if self._is_part:
            return
        self.leave()
        self._locks.close()
        self._states.close()
