"""Secure aggregation: sums of masked updates (Bonawitz et al., CCS 2017; all ranks do the work of the server).

1. Every client announces two public keys: one for masks, one for messages.
2. It draws a seed, and sends each other client, encrypted, a share of its mask key and a share of its seed.
3. It adds to its update the mask of its seed, and for each other client a mask that both know: one client adds it, the
   other subtracts it. The masked updates are summed.
4. The clients whose updates are in the sum reveal shares of each other's seeds, and shares of the mask keys of those
   whose updates are not. So the masks that have not cancelled are computed and subtracted.

No client reveals shares of both secrets of one client. All keys are for one round.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdkit_federated.errors import FederatedError
from hvdkit_federated.masks import (
    SECRET_BYTES,
    KeyPair,
    check_installed,
    expand,
    join_secret,
    seal,
    split_secret,
    unseal,
)
from hvdkit_federated.quantise import Quantiser, Words, make_quantiser

#: Public keys of a client: for masks, for messages.
PublicKeys = tuple[bytes, bytes]
#: The least number of updates in a sum: from a sum of two, each client could compute the other's.
LEAST_CLIENTS = 3


@dataclass(frozen=True)
class SecureAggregation:
    """Sum the clients' updates such that no single update is visible. Needs hvdkit[federated].

    clip: the largest absolute value in an update.
    levels: number of values between -clip and clip.
    most_samples: the largest sample count of a client.
    threshold: number of clients that must be left at the end of a round; None for more than half of the round's
        clients.
    An update is hidden from a number of clients that collude: threshold - 1, or two fewer than are left if that is
    less, which is threshold - 2 if only threshold clients are left.
    """

    clip: float = 8.0
    levels: int = 2**22
    most_samples: int = 2**20
    threshold: int | None = None

    def __post_init__(self) -> None:
        if not (np.isfinite(self.clip) and self.clip > 0):
            raise FederatedError(f"SecureAggregation: clip is {self.clip}; it must be above 0.")
        if self.levels < 2 or self.most_samples < 1:
            raise FederatedError(
                f"SecureAggregation: levels is {self.levels} and most_samples {self.most_samples}; they must be at "
                "least 2 and 1."
            )
        if self.threshold is not None and self.threshold < 2:
            raise FederatedError(
                f"SecureAggregation: threshold is {self.threshold}; it must be at least 2, or every client could read "
                "every update."
            )
        check_installed()

    def quantiser(self, clients: int) -> Quantiser:
        """Make the quantiser for a round of this number of clients."""
        return make_quantiser(self.clip, self.levels, self.most_samples, clients)

    def threshold_of(self, hosts: Mapping[int, int], ranks: int) -> int:
        """Return the threshold of a round; FederatedError if its masks would hide nothing.

        hosts: the rank of each client of the round. ranks: number of ranks. A single rank has all updates, so then only
        the number of clients is checked.
        """
        count = len(hosts)
        if count < LEAST_CLIENTS:
            raise FederatedError(
                f"SecureAggregation needs at least {LEAST_CLIENTS} clients in a round, and this one has {count}: of "
                "the sum of two, each client would know the other one's update. Take more clients or a larger "
                "fraction, or train without secure aggregation."
            )
        threshold = count // 2 + 1 if self.threshold is None else self.threshold
        if threshold > count:
            raise FederatedError(
                f"SecureAggregation: threshold is {threshold}, but the round has {count} clients. Lower it, or take a "
                "larger fraction."
            )
        rank, most = Counter(hosts.values()).most_common(1)[0]
        if ranks > 1 and most >= threshold:
            raise FederatedError(
                f"SecureAggregation: rank {rank} has {most} of the {count} clients of the round, and {threshold} of "
                "them can read every update. Divide the clients among more ranks, or set a higher threshold."
            )
        check_hidden(hosts, ranks)
        return threshold


def check_hidden(hosts: Mapping[int, int], ranks: int) -> None:
    """Raise FederatedError if a rank, which knows its own clients' updates, could read one from the sum.

    hosts: the rank of each client in the sum.
    """
    if len(hosts) < LEAST_CLIENTS:
        raise FederatedError(
            f"SecureAggregation: only {len(hosts)} clients of the round are left, and from their sum one of them could "
            "read another one's update. Nothing was unmasked. Repeat the round, or take more clients."
        )
    if ranks == 1:
        return
    for rank, own in Counter(hosts.values()).items():
        if len(hosts) - own == 1:
            raise FederatedError(
                f"SecureAggregation: rank {rank} has {own} of the {len(hosts)} clients in the sum, so it could read "
                "the update of the last one. Nothing was unmasked. Divide the clients among more ranks, or take more "
                "of them."
            )


class Participant:
    """One client in one round. Its secrets stay on its rank."""

    def __init__(self, client: int) -> None:
        self.client = client
        self._mask_key, self._message_key = KeyPair(), KeyPair()
        self._seed = os.urandom(SECRET_BYTES)
        self._keys: dict[int, PublicKeys] = {}
        self._own_shares = (b"", b"")
        self._received: dict[int, bytes] = {}
        self._revealed = False

    @property
    def public_keys(self) -> PublicKeys:
        """The keys that it announces."""
        return self._mask_key.public, self._message_key.public

    def share(self, keys: Mapping[int, PublicKeys], threshold: int) -> dict[int, bytes]:
        """Make a sealed message for each other client. keys: of all clients of the round, also this one's."""
        self._keys = dict(keys)
        order = sorted(keys)
        pairs = list(
            zip(
                split_secret(self._mask_key.secret, threshold, len(order)),
                split_secret(self._seed, threshold, len(order)),
                strict=True,
            )
        )
        self._own_shares = pairs[order.index(self.client)]
        return {
            peer: seal(self._message_key.agree(keys[peer][1], f"shares {self.client} {peer}"), first + second)
            for peer, (first, second) in zip(order, pairs, strict=True)
            if peer != self.client
        }

    def receive(self, sender: int, sealed: bytes) -> None:
        """Keep another client's message for this one."""
        self._received[sender] = sealed

    def mask(self, words: Words) -> Words:
        """Return words + the mask of the seed + the masks shared with the others, (n,)."""
        masked = words + expand(self._seed, words.size, words.dtype)
        for peer, (public, _) in self._keys.items():
            if peer != self.client:
                masked += pair_mask(self._mask_key, self.client, peer, public, words)
        return masked

    def reveal(self, summed: Collection[int]) -> dict[int, bytes]:
        """Return a share for each client of the round: of its seed if its update is in the sum, else of its mask key.

        Raises FederatedError on a second call: shares of both secrets would reveal an update.
        """
        if self._revealed:
            raise FederatedError(f"Client {self.client} was asked to reveal shares twice in a round, and refuses.")
        self._revealed = True
        shares = {}
        for peer in sorted(self._keys):
            if peer == self.client:
                key_share, seed_share = self._own_shares
            else:
                agreed = self._message_key.agree(self._keys[peer][1], f"shares {peer} {self.client}")
                opened = unseal(agreed, self._received[peer])
                key_share, seed_share = opened[:SECRET_BYTES], opened[SECRET_BYTES:]
            shares[peer] = seed_share if peer in summed else key_share
        return shares


def pair_mask(key: KeyPair, client: int, peer: int, public: bytes, like: Words) -> Words:
    """Return the mask that `client` adds for the pair; `peer` adds its negative.

    key: the client's mask key.
    client, peer: the pair.
    public: the peer's public mask key.
    like: words of the same size and dtype.
    """
    first, second = sorted((client, peer))
    words = expand(key.agree(public, f"mask {first} {second}"), like.size, like.dtype)
    return words if client < peer else np.negative(words)


def unmask(
    total: Words,
    keys: Mapping[int, PublicKeys],
    summed: Sequence[int],
    revealed: Mapping[int, Mapping[int, bytes]],
    threshold: int,
) -> Words:
    """Compute the sum of the clients' words (n,) from the sum of their masked words.

    total: the sum of the masked words.
    keys: public keys of all clients of the round.
    summed: the clients whose words are in the sum.
    revealed: the shares that each of them has revealed.
    threshold: number of shares that restore a secret.
    Raises FederatedError if shares are missing or wrong.
    """
    order = sorted(keys)
    result = total.copy()
    for client in order:
        shares = {order.index(peer): theirs[client] for peer, theirs in revealed.items()}
        secret = join_secret(shares, threshold)
        if client in summed:
            result -= expand(secret, total.size, total.dtype)
            continue
        pair = KeyPair(secret)
        if pair.public != keys[client][0]:
            raise FederatedError(f"The shares of the mask key of client {client} do not give its key back.")
        for peer in summed:
            # The peer has added its side of the mask; this client's side is the negative.
            result += pair_mask(pair, client, peer, keys[peer][0], total)
    return result
