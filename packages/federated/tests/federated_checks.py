"""Federations in one process and on ranks, for packages/federated/tests/test_federated.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hvdkit.torch as hvd
import hvdkit_federated as federated
from hvdkit.errors import HorovodInternalError
from hvdkit_federated.errors import FederatedError
from hvdkit_federated.rounds import Federation, Round

SHAPES = ((3, 2), (5,))


class OneProcess:
    """An Exchange of one rank that keeps what passes through it."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.messages: dict[str, list[Any]] = {}
        self.sums: list[NDArray[Any]] = []

    def gather(self, kind: str, message: Any) -> list[Any]:
        self.messages.setdefault(kind, []).append(message)
        return [message]

    def sum(self, array: NDArray[Any]) -> NDArray[Any]:
        self.sums.append(array.copy())
        return array

    def broadcast(self, array: NDArray[Any]) -> NDArray[Any]:
        return array


def make_weights() -> list[NDArray[Any]]:
    return [np.full(shape, 0.5, np.float32) for shape in SHAPES]


def train(client: int, weights: list[NDArray[Any]]) -> tuple[list[NDArray[Any]], int]:
    """Adds something that only this client adds."""
    generator = np.random.default_rng(client)
    return [one + generator.normal(0, 0.1, one.shape).astype(one.dtype) for one in weights], 10 + client


def mean_of(clients: Sequence[int]) -> list[NDArray[Any]]:
    """The mean of the clients' weights by their counts, computed directly."""
    trained = [train(client, make_weights()) for client in clients]
    counts = [count for _, count in trained]
    return [
        np.average(np.stack(each), axis=0, weights=counts) for each in zip(*(one for one, _ in trained), strict=True)
    ]


def round_of(federation: Federation, exchange: Any = None, function: Any = train) -> Round:
    return federation._round(exchange or OneProcess(), make_weights(), function)


def die_in_a_round() -> tuple[str, int]:
    """Rank 1 ends while its client trains; what the others are told, and the rounds they count."""
    hvd.init()
    federation = Federation([hvd.rank()], secure=federated.SecureAggregation())

    def die(client: int, weights: list[NDArray[Any]]) -> tuple[list[NDArray[Any]], int]:
        if client == 1:
            os._exit(3)
        return train(client, weights)

    try:
        federation.round(make_weights(), die)
    except HorovodInternalError as error:
        return type(error).__name__, federation.rounds
    return "", federation.rounds


def check_rounds_on_ranks() -> dict[str, Any]:
    """Rounds on three ranks with two clients each: plain, secure, with a lost client, and errors."""
    hvd.init()
    own = [2 * hvd.rank(), 2 * hvd.rank() + 1]

    def lose_one(client: int, weights: list[NDArray[Any]]) -> tuple[list[NDArray[Any]], int]:
        if client == 3:
            raise TimeoutError("the client's disk is gone")
        return train(client, weights)

    def not_a_number(client: int, weights: list[NDArray[Any]]) -> tuple[list[NDArray[Any]], int]:
        return ([one * np.nan for one in weights], 1) if client == 4 else train(client, weights)

    def words(secure: federated.SecureAggregation | None, function: Any) -> Any:
        try:
            return Federation(own, secure=secure).round(make_weights(), function)
        except FederatedError as error:
            return str(error)

    secure = federated.SecureAggregation()
    return {
        "plain": words(None, train),
        "lost": words(None, lose_one),
        "secure": words(secure, train),
        "narrow": words(federated.SecureAggregation(levels=2**14, most_samples=2**10), train),
        "secure, lost": words(secure, lose_one),
        "wrong": words(None, not_a_number),
        "too many": words(federated.SecureAggregation(threshold=2), train),
        "half": Federation(own, fraction=0.5, seed=4).round(make_weights(), train).clients,
    }
