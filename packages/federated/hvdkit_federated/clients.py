"""The clients of a round: their ranks, their selection, and the outcome of their training on this rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import HorovodInternalError, HvdkitError
from hvdkit.log import logger
from hvdkit_federated.errors import FederatedError
from hvdkit_federated.vector import Arrays, Vector, check_weights, flatten

#: train(client, weights) -> (weights, sample count). weights: copies, the client's own.
Train = Callable[[int, list[NDArray[Any]]], tuple[Arrays, int]]


def find_hosts(by_rank: Sequence[Sequence[int]]) -> dict[int, int]:
    """Map each client to its rank, in the order of clients.

    by_rank: the clients of each rank. Raises FederatedError for a client that two ranks have.
    """
    hosts: dict[int, int] = {}
    for rank, clients in enumerate(by_rank):
        for client in clients:
            if client in hosts:
                raise FederatedError(
                    f"Client {client} was given to Federation() on rank {hosts[client]} and on rank {rank}. Give every "
                    "client to the one rank that has its data."
                )
            hosts[client] = rank
    if len(hosts) < 2:
        raise FederatedError(
            f"There are {len(hosts)} clients on {len(by_rank)} ranks; federated training needs at least two. Pass the "
            "numbers of all clients whose data this rank has: Federation(clients=[...])."
        )
    return dict(sorted(hosts.items()))


def sample_clients(clients: Sequence[int], fraction: float, seed: int, turn: int, *, poisson: bool) -> list[int]:
    """Draw the clients of a round; equal arguments give the same clients.

    clients: numbers of all clients.
    fraction: fraction of the clients to draw.
    seed: seed of the draw.
    turn: the round's number.
    poisson: draw each client by itself, with probability `fraction`, and perhaps none; else draw fraction * clients of
        them, at least one.
    """
    generator = np.random.default_rng([seed, turn])
    if poisson:
        return [client for client in clients if generator.random() < fraction]
    count = max(1, round(fraction * len(clients)))
    return sorted(int(client) for client in generator.choice(np.array(clients), count, replace=False))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a client's training.

    client: its number.
    update: its weights minus those of the round, (n,); None if there is none.
    count: its number of samples.
    lost: why it is left out.
    wrong: the error in its result.
    The texts contain no numbers of the update, because all ranks get them.
    """

    client: int
    update: Vector | None = None
    count: int = 0
    lost: str = ""
    wrong: str = ""


def train_client(train: Train, client: int, weights: Arrays, timeout_s: float | None) -> Outcome:
    """Train a client, and check its result.

    If the script raises an exception, the client is lost; an error of hvdkit, as of set_weights(), is a wrong result.
    Raises HorovodInternalError, such as the loss of a rank.
    """
    start = time.monotonic()
    try:
        returned = train(client, [array.copy() for array in weights])
    except HorovodInternalError:
        raise
    except HvdkitError as error:  # raised on this rank only; the others must know of it
        name = "" if isinstance(error, FederatedError) else f"{type(error).__name__}: "
        return Outcome(client, wrong=f"{name}{error}".rstrip("."))
    except Exception as error:
        logger.warning("federated: client %d is left out of this round", client, exc_info=True)
        return Outcome(client, lost=type(error).__name__)
    if timeout_s is not None and time.monotonic() - start > timeout_s:
        return Outcome(client, lost=f"later than {timeout_s:g} s")
    return check_update(returned, client, weights)


def check_update(returned: Any, client: int, weights: Arrays) -> Outcome:
    """Compute the update from the result of `train`, or describe the error in that."""
    if not (isinstance(returned, tuple) and len(returned) == 2):
        return Outcome(client, wrong=f"train() returned a {type(returned).__name__}, not (weights, sample count)")
    try:
        arrays = check_weights(returned[0], "train()")
    except FederatedError as error:
        return Outcome(client, wrong=str(error).rstrip("."))
    here, there = [array.shape for array in weights], [array.shape for array in arrays]
    if here != there:
        return Outcome(client, wrong=f"train() returned arrays of shapes {there}, but the model has {here}")
    count = returned[1]
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
        return Outcome(client, wrong=f"its sample count is {count!r}, but must be a whole number from 0 up")
    return Outcome(client, flatten(arrays) - flatten(weights), int(count))


def check_outcomes(statuses: Mapping[int, tuple[str, str]], hosts: Mapping[int, int]) -> dict[int, str]:
    """Return the reasons for lost clients, by client. statuses: (lost, wrong) of every client of the round.

    Raises FederatedError, with the client's number, for an update that is wrong, or if no client is left.
    """
    for client, (_, wrong) in sorted(statuses.items()):
        if wrong:
            raise FederatedError(f"Client {client} on rank {hosts[client]}: {wrong}.")
    lost = {client: why for client, (why, _) in sorted(statuses.items()) if why}
    if lost and len(lost) == len(statuses):
        reasons = ", ".join(f"client {client} on rank {hosts[client]}: {why}" for client, why in lost.items())
        raise FederatedError(
            f"No client of this round is left ({reasons}). The log of its rank shows each one's exception."
        )
    return lost
