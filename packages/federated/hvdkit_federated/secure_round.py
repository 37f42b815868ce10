"""Secure aggregation among ranks: each rank acts for its clients and, in place of the server, for the round."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from hvdkit_federated.errors import FederatedError
from hvdkit_federated.exchange import RoundCollectives
from hvdkit_federated.secure import Participant, SecureAggregation, check_hidden, unmask
from hvdkit_federated.vector import Vector

Update = tuple[Vector, int]


class SecureRound:
    """The keys of a round, and its one sum. The constructor is collective: it exchanges keys and shares.

    options: the options of secure aggregation.
    exchange: collectives of the round.
    hosts: the rank of each client of the round.
    shrink: see Quantiser.encode().
    Raises FederatedError, the same on all ranks, if masks of these clients would hide nothing.
    """

    def __init__(
        self, options: SecureAggregation, exchange: RoundCollectives, hosts: Mapping[int, int], *, shrink: bool = False
    ) -> None:
        self._options, self._exchange, self._hosts = options, exchange, dict(hosts)
        self._threshold = options.threshold_of(hosts, exchange.size)
        self._quantiser = options.quantiser(len(hosts))
        self._shrink = shrink
        self._own = {client: Participant(client) for client, rank in hosts.items() if rank == exchange.rank}
        announced = {client: [key.hex() for key in one.public_keys] for client, one in self._own.items()}
        self._keys = {
            int(client): (bytes.fromhex(mask), bytes.fromhex(message))
            for theirs in exchange.gather("keys", announced)
            for client, (mask, message) in theirs.items()
        }
        shares = {
            client: {peer: sealed.hex() for peer, sealed in one.share(self._keys, self._threshold).items()}
            for client, one in self._own.items()
        }
        for theirs in exchange.gather("shares", shares):
            for sender, messages in theirs.items():
                for peer, sealed in messages.items():
                    if int(peer) in self._own:
                        self._own[int(peer)].receive(int(sender), bytes.fromhex(sealed))

    def check(self, update: Update) -> str:
        """Return the reason for which an update cannot be summed, else ""."""
        if update[1] == 0:  # if all other counts were 0 too, the sum would be one client's update
            return (
                "its sample count is 0, which SecureAggregation refuses. Let train() raise an exception instead: that "
                "leaves the client out of the round"
            )
        if update[1] > self._options.most_samples:
            return f"its sample count is above most_samples={self._options.most_samples} of SecureAggregation"
        try:
            self._quantiser.encode(*update, shrink=self._shrink)
        except FederatedError as error:
            return str(error)
        return ""

    def sum(self, updates: Mapping[int, Update], lost: Collection[int], size: int) -> tuple[Vector, int]:
        """Sum count * update, (size,), and the counts over all clients except the lost ones; collective.

        updates: of this rank's clients. Raises FederatedError if too few clients are left; nothing is unmasked then.
        """
        summed = [client for client in sorted(self._hosts) if client not in lost]
        if len(summed) < self._threshold:
            raise FederatedError(
                f"SecureAggregation: {len(summed)} of the {len(self._hosts)} clients of the round are left, but "
                f"{self._threshold} are needed to remove the masks. Nothing was unmasked. Repeat the round, or set a "
                "lower threshold."
            )
        check_hidden({client: self._hosts[client] for client in summed}, self._exchange.size)
        total = np.zeros(size + 1, self._quantiser.dtype)
        for client, update in updates.items():
            total += self._own[client].mask(self._quantiser.encode(*update, shrink=self._shrink))
        total = self._exchange.sum(total)
        revealed = {
            client: {peer: share.hex() for peer, share in self._own[client].reveal(summed).items()}
            for client in updates
        }
        shares = {
            int(client): {int(peer): bytes.fromhex(share) for peer, share in theirs.items()}
            for own in self._exchange.gather("unmask", revealed)
            for client, theirs in own.items()
        }
        return self._quantiser.decode(unmask(total, self._keys, summed, shares, self._threshold))
