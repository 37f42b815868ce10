"""Short messages between ranks, sent and received without waiting: what named operations are agreed on with."""

from __future__ import annotations

from typing import Protocol


class Mailbox(Protocol):
    """Messages among the ranks of a transport. Those from one rank to another arrive in the order of sending.

    star: can rank 0 alone exchange messages with each other rank? Else any two ranks can.
    """

    star: bool

    def send(self, rank: int, message: bytes) -> None:
        """Send, and return at once; to this rank itself as well."""

    def receive(self) -> list[tuple[int, bytes]]:
        """All messages that have come, each with its sender."""

    def close(self, *, idle: bool = True) -> None:
        """Give it back; collective. What has not been received is lost. idle: see Transport.close."""


class LocalMailbox:
    """The mailbox of a group of one rank."""

    star = True

    def __init__(self) -> None:
        self._messages: list[tuple[int, bytes]] = []

    def send(self, rank: int, message: bytes) -> None:
        """See Mailbox.send."""
        self._messages.append((rank, message))

    def receive(self) -> list[tuple[int, bytes]]:
        """See Mailbox.receive."""
        messages, self._messages = self._messages, []
        return messages

    def close(self, *, idle: bool = True) -> None:
        """See Mailbox.close."""
        self._messages.clear()
