"""Ranks that agree on a disagreement all raise their errors, also when one ends as soon as it has the answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdkit.elastic.resizing import UlfmResizing
from hvdkit.errors import HorovodInternalError, RankLostError, RanksDisagreeError

pytestmark = pytest.mark.timeout(30)


class Members:
    """Two ranks in threads. Rank 0 has each answer at once, rank 1 only when rank 0 has gone on, or has ended."""

    def __init__(self) -> None:
        self.given: tuple[list[bool], list[bool]] = ([], [])
        self.ended = False
        self.changed = threading.Condition()

    def agree(self, rank: int, true: bool) -> bool:
        with self.changed:
            self.given[rank].append(true)
            self.changed.notify_all()
            at = len(self.given[rank]) - 1
            self.changed.wait_for(lambda: len(self.given[1 - rank]) > at or self.ended)
            if rank == 1:
                self.changed.wait_for(lambda: len(self.given[0]) > at + 1 or self.ended)
                if len(self.given[0]) <= at + 1:
                    raise RankLostError("rank 0 has died")
            return all(given[at] for given in self.given)

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()


class View:
    """What one rank has of the members."""

    def __init__(self, members: Members, rank: int) -> None:
        self.members, self.own = members, rank

    def shrink(self) -> int:
        return 0

    def is_so_on_all(self, true: bool) -> bool:
        return self.members.agree(self.own, true)


def test_the_others_know_of_the_disagreement_before_a_rank_ends_by_it() -> None:
    members = Members()
    errors = (RanksDisagreeError("shapes differ"), RankLostError("the communicator was revoked"))

    def shrink(rank: int) -> HorovodInternalError | None:
        resizing = UlfmResizing.__new__(UlfmResizing)
        resizing._members = View(members, rank)  # type: ignore[assignment]
        try:
            resizing._shrink(errors[rank])
        except HorovodInternalError as error:
            return error
        finally:
            if rank == 0:
                members.end()
        return None

    with ThreadPoolExecutor(2) as threads:
        assert tuple(threads.map(shrink, range(2))) == errors
