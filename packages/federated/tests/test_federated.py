"""hvdkit_federated: rounds, server optimizers, secure aggregation, privacy."""

from __future__ import annotations

import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import federated_checks as checks
import numpy as np
import pytest
import torch
from federated_checks import OneProcess, make_weights, mean_of, round_of, train
from numpy.typing import NDArray
from ranks import RanksFailedError, run_ranks

from hvdkit.errors import CheckpointError, RankLostError
from hvdkit_federated import (
    FedAdam,
    FedAvg,
    FedAvgM,
    Federation,
    FedYogi,
    GaussianPrivacy,
    ProximalTerm,
    SecureAggregation,
    get_weights,
    proximal_gradient,
    set_weights,
)
from hvdkit_federated.clients import sample_clients
from hvdkit_federated.errors import FederatedError
from hvdkit_federated.masks import expand, join_secret, split_secret, unseal
from hvdkit_federated.quantise import Words, make_quantiser
from hvdkit_federated.secure import Participant, pair_mask, unmask

Arrays = list[NDArray[Any]]
LIMIT = 8.0 / 2**21  # half a step of the default quantiser, and float32's rounding


def assert_near(weights: Arrays, expected: Arrays, tolerance: float) -> None:
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


# Rounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_rounds_on_three_ranks_are_the_mean_by_counts() -> None:
    results = run_ranks(3, checks.check_rounds_on_ranks)
    first = results[0]
    assert_near(first["plain"].weights, mean_of(range(6)), 1e-6)
    assert_near(first["lost"].weights, mean_of([0, 1, 2, 4, 5]), 1e-6)
    assert first["lost"].lost == first["secure, lost"].lost == {3: "TimeoutError"}
    assert_near(first["secure"].weights, mean_of(range(6)), LIMIT)
    assert first["secure"].samples == first["plain"].samples == sum(range(10, 16))
    assert_near(first["narrow"].weights, mean_of(range(6)), 8.0 / 2**13)
    assert_near(first["secure, lost"].weights, mean_of([0, 1, 2, 4, 5]), LIMIT)
    for name in ("plain", "lost", "secure", "narrow", "secure, lost"):
        for other in results[1:]:
            assert_near(other[name].weights, first[name].weights, 0)
    for other in results:
        assert "Client 4 on rank 2" in other["wrong"] and "NaN" in other["wrong"]
        assert "rank 0 has 2 of the 6 clients" in other["too many"]
        assert other["half"] == first["half"] and len(first["half"]) == 3


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_dies_in_a_round_is_an_error_on_the_others() -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(3, checks.die_in_a_round, fresh=True, grace=20)
    assert failed.value.ended == [1]
    assert failed.value.results == {0: ("RankLostError", 0), 2: ("RankLostError", 0)}, str(failed.value)


def test_one_full_local_step_is_a_step_on_the_whole_batch() -> None:
    generator = np.random.default_rng(0)
    rows, targets = generator.normal(size=(60, 4)), generator.normal(size=60)
    parts = np.split(np.arange(60), [5, 20, 22])

    def step(at: NDArray[Any], weights: Arrays) -> Arrays:
        errors = rows[at] @ weights[0] - targets[at]
        return [weights[0] - 0.1 * rows[at].T @ errors / len(at)]

    def local(client: int, weights: Arrays) -> tuple[Arrays, int]:
        return step(parts[client], weights), len(parts[client])

    federation, weights = Federation([0, 1, 2, 3]), [np.zeros(4)]
    for _ in range(3):
        expected = step(np.arange(60), weights)
        weights = federation._round(OneProcess(), weights, local).weights
        assert_near(weights, expected, 1e-12)


def test_clients_are_drawn_alike_and_differ_by_round() -> None:
    draws = [sample_clients(range(10), 0.3, 7, turn, poisson=False) for turn in range(20)]
    assert draws == [sample_clients(range(10), 0.3, 7, turn, poisson=False) for turn in range(20)]
    assert {len(draw) for draw in draws} == {3}
    assert {client for draw in draws for client in draw} == set(range(10))
    drawn = [len(sample_clients(range(1000), 0.2, 7, turn, poisson=True)) for turn in range(20)]
    assert len(set(drawn)) > 1 and 170 < sum(drawn) / 20 < 230


def test_a_client_that_is_late_or_fails_is_left_out_and_nothing_is_kept_of_it() -> None:
    def fail(client: int, weights: Arrays) -> tuple[Arrays, int]:
        weights[0] += 100.0  # its own copy
        if client:
            raise OSError("secret")
        return train(client, make_weights())

    result = round_of(Federation([0, 1, 2]), function=fail)
    assert result.lost == {1: "OSError", 2: "OSError"} and result.samples == 10
    with pytest.raises(FederatedError, match="No client of this round is left"):
        round_of(Federation([1, 2]), function=fail)
    with pytest.raises(FederatedError, match="later than 1e-09 s"):
        round_of(Federation([0, 1], timeout_s=1e-9))


def test_a_failed_round_changes_nothing_and_state_continues() -> None:
    federation = Federation([0, 1], server=FedAdam())
    with pytest.raises(FederatedError):
        round_of(federation, function=lambda client, weights: (weights, -1))
    assert federation.state_dict() == {"rounds": 0, "server": {}}
    round_of(federation)
    other = Federation([0, 1], server=FedAdam())
    other.load_state_dict(federation.state_dict())
    assert_near(round_of(federation).weights, round_of(other).weights, 0)


def _raise(error: Exception) -> NoReturn:
    raise error


def test_the_loss_of_a_rank_in_training_stays_that() -> None:
    with pytest.raises(RankLostError):
        round_of(Federation([0, 1]), function=lambda _, weights: _raise(RankLostError("rank 1 has ended")))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "one client": (lambda: round_of(Federation([0])), "1 clients on 1 ranks"),
    "twice": (lambda: Federation([1, 1]), "different whole numbers"),
    "fraction": (lambda: Federation([0, 1], fraction=0), "fraction is 0"),
    "seed": (lambda: Federation([0, 1], seed=-1), "seed is -1"),
    "time": (lambda: Federation([0, 1], timeout_s=0), "timeout_s is 0"),
    "two masks": (lambda: round_of(Federation([0, 1], secure=SecureAggregation())), "at least 3 clients"),
    "threshold": (lambda: round_of(Federation([0, 1, 2], secure=SecureAggregation(threshold=4))), "has 3 clients"),
    "threshold 1": (lambda: SecureAggregation(threshold=1), "at least 2"),
    "clip": (lambda: SecureAggregation(clip=math.nan), "clip is nan"),
    "exceeded": (
        lambda: round_of(Federation([0, 1, 2], secure=SecureAggregation(clip=0.01))),
        r"Client 0 on rank 0: its update has a number beyond \+-0.01",
    ),
    "most samples": (
        lambda: round_of(Federation([0, 1, 2], secure=SecureAggregation(most_samples=11))),
        "Client 2 on rank 0: its sample count is above",
    ),
    "no samples in secret": (
        lambda: round_of(
            Federation([0, 1, 2], secure=SecureAggregation()),
            function=lambda client, weights: (weights, 5 if client == 0 else 0),
        ),
        "Client 1 on rank 0: its sample count is 0.*raise an exception",
    ),
    "overflow": (lambda: make_quantiser(1.0, 2**40, 2**20, 100), "could overflow"),
    "count": (lambda: round_of(Federation([0, 1]), function=lambda _, weights: (weights, -3)), "sample count is -3"),
    "no samples": (lambda: round_of(Federation([0, 1]), function=lambda _, weights: (weights, 0)), "all clients"),
    "shape": (
        lambda: round_of(Federation([0, 1]), function=lambda _, weights: ([one.T for one in weights], 1)),
        r"\[\(2, 3\), \(5,\)\], but the model has \[\(3, 2\), \(5,\)\]",
    ),
    "NaN": (
        lambda: round_of(Federation([0, 1]), function=lambda _, weights: ([one * np.inf for one in weights], 1)),
        "Client 0 on rank 0: train.*NaN or infinity",
    ),
    "raised by hvdkit": (
        lambda: round_of(Federation([0, 1]), function=lambda _, weights: get_weights(weights)),
        "Client 0 on rank 0: get_weights.*must be a torch module",
    ),
    "raised by another part of hvdkit": (
        lambda: round_of(Federation([0, 1]), function=lambda _, weights: _raise(CheckpointError("no shards."))),
        r"Client 0 on rank 0: CheckpointError: no shards\.$",
    ),
    "no tuple": (lambda: round_of(Federation([0, 1]), function=lambda _, weights: weights), "returned a list"),
    "whole numbers": (lambda: Federation([0, 1])._round(OneProcess(), [np.arange(3)], train), "dtype int64"),
    "server's name": (
        lambda: Federation([0], server="fedadam"),  # type: ignore[arg-type]
        r"server is 'fedadam'; pass an object, for example federated.FedAvg\(\)",
    ),
    "secure True": (lambda: Federation([0], secure=True), "secure is True; pass an object"),  # type: ignore[arg-type]
    "privacy's class": (
        lambda: Federation([0], privacy=GaussianPrivacy),  # type: ignore[arg-type]
        "privacy is <class .*>; pass an object, for example federated.GaussianPrivacy",
    ),
    "learning rate": (lambda: FedAvg(0), "learning_rate"),
    "momentum": (lambda: FedAvgM(1.0, 1.0), "momentum"),
    "noise": (lambda: GaussianPrivacy(1.0, 0.0), "noise is 0"),
    "no noise": (lambda: Federation([0, 1]).epsilon(1e-5), "there is no noise"),
    "mu": (lambda: ProximalTerm(torch.nn.Linear(1, 1), -1.0), "mu is -1"),
    "no model": (lambda: get_weights(object()), "must be a torch module or a Keras model"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_an_error_that_says_what_was_seen(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(FederatedError, match=words):
        call()


# Server and models ----------------------------------------------------------------------------------------------------


def test_server_optimizers_follow_their_articles() -> None:
    weights, updates = np.zeros(2), [np.array([0.1, -2.0]), np.array([0.3, 0.0])]

    def run(server: Any) -> NDArray[np.float64]:
        now = weights
        for update in updates:
            now = server.step(now, update)
        return now

    np.testing.assert_allclose(run(FedAvg(0.5)), 0.5 * (updates[0] + updates[1]))
    np.testing.assert_allclose(run(FedAvgM(1.0, 0.9)), updates[0] * 1.9 + updates[1])
    for server, sign in ((FedAdam(0.1), 0.0), (FedYogi(0.1), 1.0)):
        now, first, second = weights, np.zeros(2), np.full(2, 1e-6)
        for update in updates:
            first = 0.9 * first + 0.1 * update
            square = update**2
            yogi = second - 0.01 * square * np.sign(second - square)
            second = yogi if sign else 0.99 * second + 0.01 * square
            now = now + 0.1 * first / (np.sqrt(second) + 1e-3)
        np.testing.assert_allclose(run(server), now)


def test_weights_of_a_module_and_its_proximal_term() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    weights = get_weights(model)
    assert [one.shape for one in weights] == [(3, 2), (3,), (3,), (3,), (3,), (3,)], "without the counter of batches"
    term = ProximalTerm(model, 0.2)
    set_weights(model, [one + 1 for one in weights])
    assert_near(get_weights(model), [one + 1 for one in weights], 0)
    penalty = term()
    penalty.backward()
    assert float(penalty.detach()) == pytest.approx(0.5 * 0.2 * 15)
    expected = proximal_gradient([one + 1 for one in weights], weights, 0.2)
    gradient = next(model.parameters()).grad
    assert gradient is not None
    np.testing.assert_allclose(gradient.numpy(), expected[0], rtol=1e-6)
    with pytest.raises(FederatedError, match="number 0 is the first"):
        set_weights(model, [one.T for one in weights])


def _keras_rounds() -> tuple[float, float, int]:
    import keras

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    weights = get_weights(model)
    moved = []
    for mu in (0.0, 10.0):
        set_weights(model, weights)
        term = ProximalTerm(model, mu)
        model.compile(keras.optimizers.SGD(0.05), loss=term.loss(keras.losses.MeanSquaredError()))
        model.fit(np.ones((8, 2)), np.full((8, 1), 3.0), epochs=5, verbose=0)
        moved.append(sum(float(np.abs(a - b).sum()) for a, b in zip(get_weights(model), weights, strict=True)))
    return moved[0], moved[1], len(weights)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_a_keras_model_stays_nearer_with_a_proximal_term(backend: str) -> None:
    free, held, arrays = run_ranks(2, _keras_rounds, backend=backend, timeout=100)[0]
    assert arrays == 2
    assert 0 < held < 0.7 * free


# Secure aggregation ---------------------------------------------------------------------------------------------------


def make_participants(count: int, threshold: int) -> list[Participant]:
    """Participants that have each other's keys and shares."""
    people = [Participant(client) for client in range(count)]
    keys = {one.client: one.public_keys for one in people}
    for one in people:
        for peer, sealed in one.share(keys, threshold).items():
            people[peer].receive(one.client, sealed)
    return people


def make_words(count: int, bits: int = 64, size: int = 200) -> list[Words]:
    generator = np.random.default_rng(3)
    quantiser = make_quantiser(1.0, 2**16, 2**6 if bits == 32 else 2**20, count)
    assert quantiser.bits == bits
    return [quantiser.encode(generator.uniform(-1, 1, size), 5 + client) for client in range(count)]


def add(words: list[Words]) -> Words:
    total: Words = np.add.reduce(words, dtype=words[0].dtype)
    return total


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("lost", [(), (2,), (0, 4)])
def test_sums_are_those_of_the_integers_also_without_some(bits: int, lost: tuple[int, ...]) -> None:
    people, words = make_participants(5, 3), make_words(5, bits)
    summed = [client for client in range(5) if client not in lost]
    total = add([people[client].mask(words[client]) for client in summed])
    revealed = {client: people[client].reveal(summed) for client in summed}
    keys = {one.client: one.public_keys for one in people}
    expected = add([words[client] for client in summed])
    np.testing.assert_array_equal(unmask(total, keys, summed, revealed, 3), expected)
    del revealed[summed[-1]]
    if len(revealed) < 3:
        with pytest.raises(FederatedError, match="2 shares of a secret arrived, but 3"):
            unmask(total, keys, summed, revealed, 3)


def test_too_few_clients_are_left() -> None:
    def fail(client: int, weights: Arrays) -> tuple[Arrays, int]:
        if client in (1, 3, 4):
            raise OSError
        return train(client, weights)

    exchange = OneProcess()
    with pytest.raises(FederatedError, match="2 of the 5 clients of the round are left, but 3 are needed"):
        round_of(Federation(range(5), secure=SecureAggregation()), exchange, fail)
    assert "unmask" not in exchange.messages and not exchange.sums, "nothing is revealed"
    with pytest.raises(FederatedError, match="only 2 clients"):
        round_of(Federation(range(5), secure=SecureAggregation(threshold=2)), OneProcess(), fail)


def looks_uniform(words: Words) -> bool:
    """Are the bytes equally frequent? A chi-square over 256 values, whose mean is 255 and deviation 22.6."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    return bool(((counts - expected) ** 2 / expected).sum() < 255 + 8 * 22.6)


def test_a_masked_update_tells_nothing_of_it() -> None:
    update = make_words(4, size=20_000)[1]
    assert not looks_uniform(update)
    first, second = (make_participants(4, 3)[1].mask(update) for _ in range(2))
    assert looks_uniform(first) and looks_uniform(second) and looks_uniform(first - second)
    assert abs(np.corrcoef(first.astype(float), update.view(np.int64).astype(float))[0, 1]) < 0.05


def test_what_a_rank_receives_does_not_open_another_clients_update() -> None:
    """Client 0 keeps everything that is said, and even gets client 1's masked words by themselves."""
    people, words = make_participants(4, 3), make_words(4, size=20_000)
    size, dtype = words[1].size, words[1].dtype
    spy, target = people[0], people[1]
    masked = [one.mask(word) for one, word in zip(people, words, strict=True)]
    revealed = {one.client: one.reveal(range(4)) for one in people}
    # All seeds are open now, as everyone has computed the sum. The masks of pairs still hide the words.
    seed = join_secret({client: shares[1] for client, shares in revealed.items()}, 3)
    rest = masked[1] - expand(seed, size, dtype)
    rest -= pair_mask(target._mask_key, 1, 0, spy.public_keys[0], rest)  # the spy knows the mask of its own pair
    assert looks_uniform(rest)
    # Of client 1's mask key it has its own share only, below the threshold; what it has been sent for others is sealed.
    for client, shares in revealed.items():
        assert shares[1] != people[client]._own_shares[0]
    for other in (2, 3):
        agreed = spy._message_key.agree(target.public_keys[1], f"shares 1 {other}")
        with pytest.raises(FederatedError, match="made for another client"):
            unseal(agreed, people[other]._received[1])
    with pytest.raises(FederatedError, match="refuses"):
        people[2].reveal([0, 2, 3])  # would be the share of client 1's mask key


def test_the_messages_of_a_round_hold_no_update() -> None:
    exchange, again = OneProcess(), OneProcess()
    for each in (exchange, again):
        round_of(Federation(range(4), secure=SecureAggregation()), each)
    assert set(exchange.messages) == {"clients", "keys", "shares", "outcomes", "unmask"}
    assert exchange.messages["outcomes"] == [[[client, "", ""] for client in range(4)]]
    assert not np.any(exchange.sums[0] == again.sums[0]), "other keys, other numbers, also for the count"


def test_a_secret_needs_as_many_shares_as_the_threshold() -> None:
    secret = bytes(range(32))
    shares = dict(enumerate(split_secret(secret, 3, 5)))
    assert join_secret({at: shares[at] for at in (4, 0, 2)}, 3) == secret
    assert join_secret({at: shares[at] for at in (4, 0)}, 2) != secret
    people, words = make_participants(3, 2), make_words(3)
    keys = {one.client: one.public_keys for one in people}
    revealed = {client: people[client].reveal([0, 1]) for client in (0, 1)}
    revealed[0][2] = bytes(32)
    with pytest.raises(FederatedError, match="do not give its key back"):
        unmask(people[0].mask(words[0]) + people[1].mask(words[1]), keys, [0, 1], revealed, 2)


# Privacy --------------------------------------------------------------------------------------------------------------


def test_updates_are_clipped_and_the_noise_is_of_the_size_that_was_asked_for() -> None:
    privacy = GaussianPrivacy(clip=0.5, noise=2.0)
    clipped = privacy.clipped(np.array([3.0, 4.0]))
    np.testing.assert_allclose(clipped, [0.3, 0.4])
    np.testing.assert_allclose(privacy.clipped(clipped / 2), clipped / 2)
    noise = privacy.noisy(np.zeros(40_000), np.random.default_rng(0))
    assert noise.std() == pytest.approx(1.0, rel=0.02) and abs(noise.mean()) < 0.02


def test_a_private_round_weighs_clients_alike() -> None:
    federation = Federation(range(6), privacy=GaussianPrivacy(clip=1e3, noise=1e-9), secure=SecureAggregation())
    trained = [train(client, make_weights())[0] for client in range(6)]
    expected = [np.mean(np.stack(each), axis=0) for each in zip(*trained, strict=True)]
    assert_near(round_of(federation).weights, expected, LIMIT)


def test_epsilon_is_that_of_the_gaussian_mechanism() -> None:
    federation = Federation(range(5), privacy=GaussianPrivacy(clip=1.0, noise=2.0))
    assert federation.epsilon(1e-5) == 0.0
    round_of(federation)
    one = federation.epsilon(1e-5)
    # Renyi: the smallest over alpha of alpha / (2 noise^2) + log(1/delta) / (alpha - 1) bounds it from above.
    bound = min(alpha / 8 + math.log(1e5) / (alpha - 1) for alpha in np.arange(1.1, 60, 0.1))
    assert 0.7 * bound < one <= bound + 1e-9
    assert federation.privacy is not None
    assert federation.privacy.epsilon(1, 0.1, 1e-5) < one < federation.privacy.epsilon(2, 1.0, 1e-5)


# The example ----------------------------------------------------------------------------------------------------------


def _play(*arguments: str) -> None:
    import hvdkit.torch as hvd

    hvd.shutdown()
    name = str(Path(__file__).parents[3] / "examples" / "federated_digits.py")
    before, sys.argv = sys.argv, [name, *arguments]
    try:
        runpy.run_path(name, run_name="__main__")
    finally:
        sys.argv = before
        hvd.shutdown()


@pytest.mark.ranks
@pytest.mark.slow
def test_the_example_learns_the_digits() -> None:
    run_ranks(3, _play, "--rounds", "10", "--secure", "--min-accuracy", "0.65", timeout=100)
