"""Rounds of federated averaging among the ranks of a job."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.engine.api import ProcessSet, global_process_set
from hvdkit_federated.clients import Outcome, Train, check_outcomes, find_hosts, sample_clients, train_client
from hvdkit_federated.errors import FederatedError
from hvdkit_federated.exchange import EngineCollectives, RoundCollectives
from hvdkit_federated.privacy import GaussianPrivacy
from hvdkit_federated.secure import SecureAggregation
from hvdkit_federated.secure_round import SecureRound
from hvdkit_federated.server import FedAvg, ServerOptimizer
from hvdkit_federated.vector import Vector, check_weights, digest, flatten, unflatten


@dataclass(frozen=True)
class Round:
    """The result of a round, the same on all ranks.

    weights: weights of the next round.
    clients: the clients that were drawn.
    lost: the reason for each client that is left out.
    samples: the sum of the other clients' sample counts; with privacy, which gives all clients one weight, their
        number.
    update_norm: the L2 norm of the mean update.
    """

    weights: list[NDArray[Any]]
    clients: list[int]
    lost: dict[int, str]
    samples: int
    update_norm: float


class Federation:
    """Federated training; the arguments are the same on every rank, except `clients`.

    clients: the numbers of the clients whose data this rank has; none, one or several. They train one after another.
    fraction: fraction of all clients that take part in a round.
    seed: seed of their choice, the same on all ranks.
    server: FedAvg() if None.
    secure: sums that show no single update.
    privacy: clipping and noise; then each client is drawn by itself, with the probability `fraction`, by a seed that
        rank 0 draws, and all have the same weight.
    timeout_s: a client that trains longer is left out of its round; the round still waits for it.
    process_set: the ranks.
    Raises FederatedError for invalid options, MissingDependencyError without the packages that `secure` needs.
    """

    def __init__(
        self,
        clients: Sequence[int],
        *,
        fraction: float = 1.0,
        seed: int = 0,
        server: ServerOptimizer | None = None,
        secure: SecureAggregation | None = None,
        privacy: GaussianPrivacy | None = None,
        timeout_s: float | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self.clients = [int(client) for client in clients]
        if len(set(self.clients)) != len(self.clients) or min(self.clients, default=0) < 0:
            raise FederatedError(
                f"Federation: clients is {self.clients}; it must be different whole numbers from 0 up."
            )
        if not 0 < fraction <= 1:
            raise FederatedError(f"Federation: fraction is {fraction}; it must be above 0 and at most 1.")
        if seed < 0:
            raise FederatedError(f"Federation: seed is {seed}; it must be 0 or more.")
        if timeout_s is not None and not timeout_s > 0:
            raise FederatedError(f"Federation: timeout_s is {timeout_s}; it must be above 0.")
        _check_class("server", server, ServerOptimizer, "federated.FedAvg()")
        _check_class("secure", secure, SecureAggregation, "federated.SecureAggregation()")
        _check_class("privacy", privacy, GaussianPrivacy, "federated.GaussianPrivacy(clip=1.0, noise=1.1)")
        self.fraction, self.seed, self.timeout_s = fraction, seed, timeout_s
        self.server = FedAvg() if server is None else server
        self.secure, self.privacy = secure, privacy
        self._process_set = process_set
        #: Number of finished rounds.
        self.rounds = 0

    def round(self, weights: Sequence[NDArray[Any]], train: Train) -> Round:
        """Do a round; collective.

        weights: the same on all ranks.
        train: called as train(client, weights) for each drawn client of this rank; returns the client's new weights and
            its number of samples. If it raises an exception, the client is left out of the round.
        Raises FederatedError on all ranks, with nothing changed, for weights or options that differ between ranks,
        updates that are not numbers of the right shapes, and too few clients; HorovodInternalError if a rank is lost.
        """
        return self._round(EngineCollectives(self._process_set), weights, train)

    def _round(self, exchange: RoundCollectives, weights: Sequence[NDArray[Any]], train: Train) -> Round:
        arrays, problem = _try_weights(weights)
        facts: dict[str, Any] = {"clients": self.clients, "wrong": problem, "alike": [self._describe(), digest(arrays)]}
        facts["seed"] = secrets.randbits(63) if self.privacy is not None else self.seed
        directory = exchange.gather("clients", facts)
        _check_alike(directory)
        hosts = find_hosts([facts["clients"] for facts in directory])
        drawn = sample_clients(
            list(hosts), self.fraction, directory[0]["seed"], self.rounds, poisson=self.privacy is not None
        )
        hosts_drawn = {client: hosts[client] for client in drawn}
        secured: SecureRound | None = None
        if self.secure is not None:
            secured = SecureRound(self.secure, exchange, hosts_drawn, shrink=self.privacy is not None)
        outcomes = [
            self._limit(train_client(train, client, arrays, self.timeout_s), secured)
            for client in drawn
            if hosts[client] == exchange.rank
        ]
        statuses = exchange.gather("outcomes", [[one.client, one.lost, one.wrong] for one in outcomes])
        by_client = {int(client): (lost, wrong) for own in statuses for client, lost, wrong in own}
        lost = check_outcomes(by_client, hosts)
        left = [one for one in outcomes if one.client not in lost]
        size = sum(array.size for array in arrays)
        if secured is not None:
            total, samples = secured.sum({one.client: _update(one) for one in left}, lost, size)
        else:
            total, samples = _plain_sum(exchange, left, size)
        mean = self._mean(exchange, total, samples, len(hosts))
        start = flatten(arrays)
        stepped = self.server.step(start, mean)
        self.rounds += 1
        return Round(unflatten(stepped, arrays), drawn, lost, samples, float(np.linalg.norm(mean)))

    def _limit(self, outcome: Outcome, secured: SecureRound | None) -> Outcome:
        """Clip for privacy, and check whether secure aggregation accepts the update."""
        if outcome.update is None:
            return outcome
        if self.privacy is not None:
            outcome = replace(outcome, update=self.privacy.clipped(outcome.update), count=1)
        wrong = "" if secured is None else secured.check(_update(outcome))
        return replace(outcome, wrong=wrong)

    def _mean(self, exchange: RoundCollectives, total: Vector, samples: int, clients: int) -> Vector:
        if self.privacy is not None:
            noisy = self.privacy.noisy(total, np.random.default_rng()) if exchange.rank == 0 else total
            return exchange.broadcast(noisy) / (self.fraction * clients)
        if samples == 0:
            raise FederatedError(
                "The sample counts of all clients of this round are 0, so there is no mean. Return the number of "
                "samples that a client has trained on."
            )
        return total / samples

    def _describe(self) -> str:
        """Describe the options that must be equal on all ranks."""
        seed = "" if self.privacy is not None else f", seed {self.seed}"
        return (
            f"round {self.rounds}, fraction {self.fraction}{seed}, {self.server.describe()}, secure {self.secure}, "
            f"privacy {self.privacy}"
        )

    def epsilon(self, delta: float) -> float:
        """Return the epsilon that the rounds so far have spent at this delta.

        Raises FederatedError without privacy or for a bad delta, MissingDependencyError without the extra `privacy`.
        """
        if self.privacy is None:
            raise FederatedError("Federation.epsilon(): there is no noise. Pass privacy=GaussianPrivacy(...).")
        return self.privacy.epsilon(self.rounds, self.fraction, delta)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rounds and the server's state, for checkpoints and elastic states."""
        return {"rounds": self.rounds, "server": self.server.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of state_dict()."""
        self.rounds = int(state["rounds"])
        self.server.load_state_dict(state["server"])


def _try_weights(weights: Any) -> tuple[list[NDArray[Any]], str]:
    """Return the weights, or the error in them, which all ranks get."""
    try:
        return check_weights(weights, "Federation.round()"), ""
    except FederatedError as error:
        return [], str(error)


def _check_class(option: str, value: Any, expected: type, example: str) -> None:
    """Raise FederatedError for a value that is neither None nor an object of the class."""
    if value is not None and not isinstance(value, expected):
        raise FederatedError(f"Federation: {option} is {value!r}; pass an object, for example {example}, or None.")


def _check_alike(directory: Sequence[dict[str, Any]]) -> None:
    for rank, facts in enumerate(directory):
        if facts["wrong"]:
            raise FederatedError(f"Rank {rank}: {facts['wrong']}")
        for what, mine, theirs in zip(("", "weights "), directory[0]["alike"], facts["alike"], strict=True):
            if mine != theirs:
                raise FederatedError(
                    f"Federation.round() was called differently: on rank 0 with {what}{mine}, on rank {rank} with "
                    f"{what}{theirs}. Make the model and the Federation alike on all ranks: broadcast the weights of "
                    "rank 0 before the first round."
                )


def _update(outcome: Outcome) -> tuple[Vector, int]:
    assert outcome.update is not None, "of clients that are lost nothing is summed"
    return outcome.update, outcome.count


def _plain_sum(exchange: RoundCollectives, left: Sequence[Outcome], size: int) -> tuple[Vector, int]:
    """Sum count * update, (size,), and the counts over all ranks."""
    total = np.zeros(size + 1)
    for update, count in map(_update, left):
        total[0] += count
        total[1:] += count * update
    total = exchange.sum(total)
    return total[1:], round(total[0])
