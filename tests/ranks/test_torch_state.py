"""All ranks begin alike: parameters, optimizer state and objects of one on all; and init, shutdown and who am I."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cases import product
from ranks import run_ranks
from torch import nn
from torch_world import Weights, joined, weights

import hvdkit.torch as hvd
from hvdkit.engine import runtime as engine
from hvdkit.errors import ConfigError, HorovodInternalError, HvdkitError, NotInitializedError

pytestmark = pytest.mark.ranks

SIZES = pytest.mark.parametrize("size", [1, 2, 3])

# init and shutdown --------------------------------------------------------------------------------------------------

_TENSOR = torch.ones(2)
_OPTIMIZERS = ("DistributedOptimizer", "LocalSGD", "DiLoCo", "AsynchronousOptimizer", "BackupSteps")


def _wrap_an_optimizer(name: str) -> None:
    getattr(hvd, name)(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))


CALLS: dict[str, Callable[[], Any]] = {
    "rank": hvd.rank,
    "size": hvd.size,
    "local_rank": hvd.local_rank,
    "local_size": hvd.local_size,
    "cross_rank": hvd.cross_rank,
    "cross_size": hvd.cross_size,
    "describe": hvd.describe,
    "barrier": hvd.barrier,
    "allreduce": lambda: hvd.allreduce(_TENSOR),
    "allreduce_": lambda: hvd.allreduce_(_TENSOR),
    "broadcast_async_": lambda: hvd.broadcast_async_(_TENSOR, 0),
    "allgather": lambda: hvd.allgather(_TENSOR),
    "allgather_async": lambda: hvd.allgather_async(_TENSOR),
    "broadcast": lambda: hvd.broadcast(_TENSOR, 0),
    "broadcast_": lambda: hvd.broadcast_(_TENSOR, 0),
    "broadcast_object": lambda: hvd.broadcast_object(1),
    "allgather_object": lambda: hvd.allgather_object(1),
    "broadcast_parameters": lambda: hvd.broadcast_parameters({}),
    "broadcast_optimizer_state": lambda: hvd.broadcast_optimizer_state(torch.optim.SGD([_TENSOR], lr=0.1)),
    **{name: partial(_wrap_an_optimizer, name) for name in _OPTIMIZERS},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_before_init_says_what_is_missing(name: str) -> None:
    assert not hvd.is_initialized()
    with pytest.raises(NotInitializedError, match=rf"{name}\(\) was called before hvd.init\(\)") as caught:
        CALLS[name]()
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, HvdkitError)


def come_and_go() -> list[int]:
    seen = []
    for _ in range(3):
        hvd.init()
        assert hvd.is_initialized()
        first = engine.runtime("test").transport
        hvd.init()
        assert engine.runtime("test").transport is first, "the second init() does nothing"
        seen.append(int(hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum)))
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        for call in (hvd.rank, hvd.size, hvd.barrier):
            with pytest.raises(NotInitializedError, match=r"after hvd.shutdown\(\)"):
                call()
    return seen


@SIZES
def test_init_and_shutdown_may_be_called_again_and_again(size: int) -> None:
    assert run_ranks(size, come_and_go) == [[sum(range(size + 1))] * 3] * size


def ask_who_am_i() -> tuple[int, ...]:
    with joined():
        return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


@SIZES
def test_every_rank_knows_its_place(size: int) -> None:
    assert run_ranks(size, ask_who_am_i) == [(rank, size, rank, size, 0, 1) for rank in range(size)]


def describe_the_world() -> str:
    with joined():
        return hvd.describe()


@pytest.mark.native("shared memory")
def test_all_ranks_describe_the_world_alike() -> None:
    answers = run_ranks(2, describe_the_world)
    assert answers[0] == answers[1]
    assert answers[0].startswith("2 ranks on 1 host (") and "shared_memory transport, torch 2." in answers[0]
    assert answers[0].endswith("1 thread per rank")


def init_with_all_or_what_is_refused() -> tuple[int, ...]:
    size = engine.init().world.size
    engine.shutdown()
    hvd.init(comm=list(range(size)))
    job_ranks = engine.runtime("test").world.job_ranks
    hvd.shutdown()
    with pytest.raises(ConfigError, match="small_bytes is -1"):
        hvd.init(small_bytes=-1)
    with pytest.raises(TypeError, match="no_such_setting"):
        hvd.init(no_such_setting=1)
    return job_ranks


def test_a_list_of_all_ranks_is_no_part_and_settings_that_cannot_be_are_refused() -> None:
    assert run_ranks(2, init_with_all_or_what_is_refused) == [(), ()]


def fork_in_the_middle() -> float:
    """A child that ends as a Python process does leaves its parent among the ranks."""
    with joined():
        hvd.allreduce(torch.zeros(100_000))
        if hvd.rank() == 0:
            child = os.fork()
            if not child:
                engine._at_exit()
                os._exit(0)
            os.waitpid(child, 0)
        return float(hvd.allreduce(torch.ones(100_000), op=hvd.Sum)[7])


def test_a_forked_child_that_ends_takes_nobody_with_it() -> None:
    assert run_ranks(2, fork_in_the_middle) == [2.0, 2.0]


# broadcast_parameters -----------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Whatever a model may hold: buffers, tied, frozen, narrow and complex parameters, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.normal = nn.BatchNorm2d(4)
        self.first = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.narrow = nn.Parameter(torch.randn(3).bfloat16())
        self.imaginary = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.rand(5) < 0.5)
        self.note = "a note"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def _odd(seed: int) -> Odd:
    torch.manual_seed(seed)
    model = Odd()
    with torch.no_grad():
        model.normal.running_mean.normal_()  # type: ignore[union-attr]
        model.normal.num_batches_tracked.fill_(seed)  # type: ignore[union-attr]
    return model


def _assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert list(one) == list(two)
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, two[name], rtol=0, atol=0, msg=name)
        else:
            assert value == two[name]


def start_alike(transport: str, how: str) -> None:
    with joined(transport):
        for root in range(hvd.size()):
            model, expected = _odd(hvd.rank()), _odd(root)
            memory = {name: value.data_ptr() for name, value in model.named_parameters()}
            if how == "state_dict":
                hvd.broadcast_parameters(model.state_dict(), root_rank=root)
                _assert_same(model.state_dict(), expected.state_dict())
            elif how == "any order":
                entries = list(model.state_dict().items())
                hvd.broadcast_parameters(dict(entries[:: 1 - 2 * (hvd.rank() % 2)]), root_rank=root)
                _assert_same(model.state_dict(), expected.state_dict())
            else:
                given = model.parameters() if how == "parameters" else getattr(model, how)()
                hvd.broadcast_parameters(given, root_rank=root)
                _assert_same(dict(model.named_parameters()), dict(expected.named_parameters()))
                assert int(model.normal.num_batches_tracked) == hvd.rank()  # type: ignore[arg-type]
            assert memory == {name: value.data_ptr() for name, value in model.named_parameters()}
            assert model.tied.weight is model.first.weight and not model.first.bias.requires_grad


@SIZES
@pytest.mark.parametrize(
    ("transport", "how"),
    product(
        ["auto", "mpi"],
        ["state_dict", "any order", "named_parameters", "parameters"],
        quick=lambda transport, how: (transport == "mpi") == (how == "any order"),
    ),
)
def test_parameters_are_overwritten_with_the_roots_in_place(transport: str, how: str, size: int) -> None:
    run_ranks(size, start_alike, transport, how)


def start_with_what_differs() -> list[str]:
    with joined():
        last = hvd.rank() == hvd.size() - 1
        pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"a": torch.ones(2), "b": torch.ones(3)}, {"a": torch.ones(2), "b": torch.ones(4)}),
            ({"a": torch.ones(2), "b": torch.ones(3)}, {"a": torch.ones(2), "b": torch.ones(3).double()}),
            ({"a": torch.ones(2), "b": torch.ones(3)}, {"a": torch.ones(2), "c": torch.ones(3)}),
            ({"a": torch.ones(2), "b": torch.ones(3)}, {"a": torch.ones(2)}),
            ({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(3)}),
        ]
        messages = []
        for usual, odd in pairs:
            mine = odd if last else usual
            mine["a"].fill_(hvd.rank())
            with pytest.raises(HorovodInternalError) as caught:
                hvd.broadcast_parameters(mine)
            messages.append(str(caught.value))
            assert mine["a"].tolist() == [hvd.rank()] * 2, "nothing is overwritten"
        for root in (-1, hvd.size()):
            with pytest.raises(ValueError, match=f"root_rank is {root}"):
                hvd.broadcast_parameters({}, root_rank=root)
        hvd.broadcast_parameters({"text": "left alone"})
        return messages


@pytest.mark.parametrize("size", [2, 3])
def test_models_that_differ_are_an_error_on_every_rank(size: int) -> None:
    answers = run_ranks(size, start_with_what_differs)
    assert all(answer == answers[0] for answer in answers)
    last = f"rank {size - 1}"
    for message, here, there in zip(
        answers[0],
        ["b torch.float32 [3]", "b torch.float32 [3]", "b torch.float32 [3]", "b torch.float32 [3]", "none"],
        ["b torch.float32 [4]", "b torch.float64 [3]", "c torch.float32 [3]", "none", "b torch.float32 [3]"],
        strict=True,
    ):
        assert f"The first difference is number 1: {here} on rank 0, {there} on {last}." in message


# broadcast_optimizer_state ------------------------------------------------------------------------------------------

LENIENT = {"LBFGS": {"lr": 0.1, "max_iter": 3, "history_size": 4}}


def _all_optimizers() -> list[str]:
    found = [name for name, one in vars(torch.optim).items() if isinstance(one, type)]
    return sorted(
        name for name in found if name != "Optimizer" and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    )


@dataclass(frozen=True)
class Kind:
    """An optimizer and how it is made. as_tensor: with learning rates that are tensors."""

    name: str
    as_tensor: bool = False

    def make(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A model and an optimizer; weights and learning rates depend on the seed."""
        torch.manual_seed(seed)
        if self.name == "SparseAdam":
            layers: list[nn.Module] = [nn.Embedding(10, 6, sparse=True), nn.Embedding(10, 6, sparse=True)]
        else:
            layers = [nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False)]
        model = nn.Sequential(*layers)
        options: dict[str, Any] = {"lr": 0.01 * (seed + 1), **LENIENT.get(self.name, {})}
        if self.as_tensor:
            options["lr"] = torch.tensor(options["lr"])
        first, last = model[0].parameters(), model[-1].parameters()
        groups: Any = [{"params": first}, {"params": last, "lr": options["lr"] / 2}]
        if self.name in ("LBFGS", "SparseAdam"):
            groups = model.parameters() if self.name == "LBFGS" else [*first, *last]
        return model, getattr(torch.optim, self.name)(groups, **options)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, steps: int = 2) -> None:
        """Some steps with inputs that depend on the seed."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            if self.name == "SparseAdam":
                inputs = torch.randint(0, 10, (4,), generator=generator)
            else:
                inputs = torch.randn(4, 6, generator=generator)

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                optimizer.zero_grad()
                outputs = (model[0](inputs) * model[1](inputs)) if inputs.dtype == torch.int64 else model(inputs)  # type: ignore[index]
                loss = outputs.square().mean()
                loss.backward()
                return loss  # type: ignore[no-any-return]

            if self.name == "LBFGS":
                optimizer.step(closure)  # type: ignore[arg-type]
            else:
                closure()
                optimizer.step()


def resume(kind: Kind, trained: str, root: int) -> tuple[Weights, Weights, str]:
    """Weights after ranks with a past of their own have been made root's equals; and what root would have got alone.

    trained: the ranks that have a past: "none", "all", "root" or "others".
    """
    with joined():
        rank = hvd.rank()
        has_past = {"none": False, "all": True, "root": rank == root, "others": rank != root}[trained]

        def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
            model, optimizer = kind.make(seed=rank)
            if has_past:
                kind.train(model, optimizer, seed=100 + rank)
            return model, optimizer

        (model, optimizer), alone = begin(), begin()
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        kind.train(model, optimizer, seed=7)
        kind.train(*alone, seed=7)
        return weights(model), weights(alone[0]), repr(_plain(optimizer.state_dict()))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _check_resume(kind: Kind, trained: str, root: int, size: int) -> None:
    answers = run_ranks(size, resume, kind, trained, root)
    expected = answers[root][1]
    for mine, _, state in answers:
        for one, two in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(one, two)
        assert state == answers[root][2]


# Each optimizer with the root alone trained, which has state that the others lack; the other ways with one optimizer.
@pytest.mark.parametrize(
    ("name", "trained"),
    [*((name, "root") for name in _all_optimizers()), ("Adam", "none"), ("Adam", "all"), ("Adam", "others")],
)
def test_training_goes_on_as_on_the_root(name: str, trained: str) -> None:
    _check_resume(Kind(name), trained, root=1, size=2)


@pytest.mark.parametrize(
    ("name", "trained"),
    product(
        ["SGD", "Adam", "AdamW", "Adagrad"],
        ["none", "all", "root"],
        quick=lambda name, trained: trained == "root",
    ),
)
def test_learning_rates_may_be_tensors(name: str, trained: str) -> None:
    _check_resume(Kind(name, as_tensor=True), trained, root=0, size=3)


def resume_distributed() -> Weights:
    with joined():
        kind = Kind("Adam")
        model, plain = kind.make(seed=hvd.rank())
        if hvd.rank() == 0:
            kind.train(model, plain, seed=1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        hvd.broadcast_parameters(model.state_dict())
        hvd.broadcast_optimizer_state(optimizer)
        kind.train(model, optimizer, seed=hvd.rank())
        scheduler.step()
        kind.train(model, optimizer, seed=hvd.rank())
        return weights(model)


@SIZES
def test_a_wrapped_optimizer_gets_the_roots_state_as_well(size: int) -> None:
    answers = run_ranks(size, resume_distributed)
    for other in answers[1:]:
        for one, two in zip(answers[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


def broadcast_state_that_does_not_fit() -> str:
    with joined():
        counts = (1, 2) if hvd.rank() == 1 else (2, 1)
        groups = [{"params": [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]} for count in counts]
        with pytest.raises(HorovodInternalError) as caught:
            hvd.broadcast_optimizer_state(torch.optim.SGD(groups, lr=0.1))
        with pytest.raises(ValueError, match="root_rank is 9"):
            hvd.broadcast_optimizer_state(torch.optim.SGD(groups, lr=0.1), root_rank=9)
        return str(caught.value)


@pytest.mark.parametrize("size", [2, 3])
def test_other_parameter_groups_are_an_error_on_every_rank(size: int) -> None:
    answers = run_ranks(size, broadcast_state_that_does_not_fit)
    assert all(answer == answers[0] for answer in answers)
    assert "number 0: of 2 parameters on rank 0, of 1 parameters on rank 1." in answers[0]


# objects ------------------------------------------------------------------------------------------------------------


@dataclass
class Thing:
    """An object of the user's."""

    number: int
    inside: Any = None

    def __reduce__(self) -> Any:
        return Thing, (self.number, self.inside)


def _things(rank: int) -> list[Any]:
    return [
        None,
        rank,
        10 ** (400 + rank),
        -0.0 if rank else 0.0,
        "größe" * rank,
        b"",
        bytes(range(256)) * (5000 * rank),
        {"epoch": rank, ("a", 1): [1, {2, 3}], None: frozenset({rank})},
        OrderedDict(b=1, a=rank),
        Thing(rank, Thing(-rank)),
        ValueError("bad", rank),
        np.arange(rank * 3).reshape(3, rank),
        torch.full((2, rank), 7.0).bfloat16(),
        range(rank),
        Thing,
        len,
    ]


def _text(values: list[Any]) -> str:
    return repr([(type(value).__name__, value.shape if hasattr(value, "shape") else "", value) for value in values])


def send_objects(transport: str) -> None:
    with joined(transport):
        rank, size = hvd.rank(), hvd.size()
        mine = _things(rank)
        for root in range(size):
            for own, expected in zip(mine, _things(root), strict=True):
                got = hvd.broadcast_object(own, root_rank=root, name="thing")
                assert _text([got]) == _text([expected])
        gathered = [hvd.allgather_object(own) for own in mine]
        for at, seen in enumerate(gathered):
            assert _text(seen) == _text([_things(other)[at] for other in range(size)])
        itself: list[Any] = [rank]
        itself.append(itself)
        copied = hvd.broadcast_object(itself)
        assert copied[0] == 0 and copied[1] is copied
        for root in (-1, size):
            with pytest.raises(ValueError, match=f"root_rank is {root}"):
                hvd.broadcast_object(1, root_rank=root)


@SIZES
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_objects_of_any_kind_reach_every_rank(transport: str, size: int) -> None:
    run_ranks(size, send_objects, transport)


@pytest.mark.parametrize(("seen", "places"), [(1, [0, 0, 0]), (2, [0, 1, 0]), (3, [0, 1, 2]), (8, [0, 1, 2])])
def test_a_rank_takes_one_of_the_gpus_that_it_sees(
    seen: int, places: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hvdkit.torch import basics  # a GPU cannot be had for real here

    monkeypatch.setattr(basics, "built_for", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    for local_rank, place in enumerate(places):
        monkeypatch.setattr(basics, "local_rank", lambda local_rank=local_rank: local_rank)
        assert hvd.local_device() == torch.device("cuda", place)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert hvd.local_device() == torch.device("cpu")
