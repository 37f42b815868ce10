"""A mailbox over the connections of a mesh."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.transport.gloo.peers import Mesh


class MeshMailbox:
    """See Mailbox. ranks: the number in the mesh of each rank. channel: 16 bytes, of this mailbox alone."""

    star = False

    def __init__(self, mesh: Mesh, ranks: Sequence[int], channel: bytes) -> None:
        self._mesh, self._ranks, self._channel = mesh, tuple(ranks), channel
        self._numbers = {peer: rank for rank, peer in enumerate(ranks)}

    def send(self, rank: int, message: bytes) -> None:
        """See Mailbox.send."""
        self._mesh.send(self._ranks[rank], self._channel, message)

    def receive(self) -> list[tuple[int, bytes]]:
        """See Mailbox.receive."""
        return [(self._numbers[peer], message) for peer, message in self._mesh.receive(self._channel)]

    def close(self, *, idle: bool = True) -> None:
        """See Mailbox.close."""
        self._mesh.close_channel(self._channel)

    def is_sent(self, rank: int) -> bool:
        """Has the system taken all that was sent to this rank?"""
        return self._mesh.is_sent(self._ranks[rank])

    def check(self, rank: int) -> None:
        """Raise RankLostError if this rank is known to have ended."""
        self._mesh.check([self._ranks[rank]])
