"""hvd's collectives on torch tensors are numpy's, on any number of ranks, for every dtype and shape."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import product, quick_ones
from numbers_of_ranks import DTYPES, FLOATS, INTEGERS, REDUCTIONS, pattern, reduced
from ranks import run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.engine.reduce_op import ReduceOp
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.buffer import FLOAT8, Op

pytestmark = pytest.mark.ranks

SIZES = pytest.mark.parametrize("size", [1, 2, 3])
TRANSPORTS = ["auto", "mpi", "hierarchical_pairs"]
SIZES_AND_TRANSPORTS = pytest.mark.parametrize(
    ("size", "transport"),
    product([1, 2, 3], TRANSPORTS, quick=lambda size, transport: size == 3 or (size, transport) == (1, "auto")),
)
KINDS: dict[Op, ReduceOp] = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3, 0, 2), (5,), (3, 4, 5)]
LARGE = (150, 211)  # above small_bytes, 64 KiB, in all dtypes but the narrowest


def tensor_of(rank: int, shape: tuple[int, ...], dtype: str, op: Op = "sum") -> torch.Tensor:
    values = torch.from_numpy(pattern(rank, int(np.prod(shape)), dtype, op))
    return values.to(getattr(torch, dtype)).view(shape)


def sum_of(size: int, shape: tuple[int, ...], dtype: str, op: Op = "sum") -> torch.Tensor:
    values = torch.from_numpy(reduced(size, int(np.prod(shape)), dtype, op))
    return values.to(getattr(torch, dtype)).view(shape)


def expect(tensor: torch.Tensor, expected: torch.Tensor, about: str = "") -> None:
    if tensor.dtype == expected.dtype and tensor.element_size() == 1:  # float8 cannot be compared by torch
        tensor, expected = tensor.view(torch.uint8), expected.view(torch.uint8)
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{about}: {text}")


# allreduce ----------------------------------------------------------------------------------------------------------


def reduce_everything(transport: str) -> None:
    with joined(transport):
        for dtype, op in REDUCTIONS:
            for shape in (*SHAPES, LARGE):
                given = tensor_of(hvd.rank(), shape, dtype, op)
                before = given.clone()
                expected = sum_of(hvd.size(), shape, dtype, op)
                made = hvd.allreduce(given, op=KINDS[op])
                about = f"{dtype} {op} {shape}"
                expect(made, expected, about)
                expect(given, before, f"{about}: the source was changed")
                assert made.data_ptr() != given.data_ptr() or not made.numel()
                assert hvd.allreduce_(given, op=KINDS[op]) is given
                expect(given, expected, about)


@pytest.mark.native("Horovod does not add every dtype; see test_torch_on_horovod.py")
@SIZES_AND_TRANSPORTS
def test_allreduce_of_every_dtype_op_and_shape(transport: str, size: int) -> None:
    run_ranks(size, reduce_everything, transport)


def average_everything() -> None:
    with joined():
        for dtype in INTEGERS + FLOATS:
            for shape in (*SHAPES, LARGE):
                given = tensor_of(hvd.rank(), shape, dtype)
                total = torch.from_numpy(reduced(hvd.size(), given.numel())).view(shape)
                mean = total.double() / hvd.size() if dtype in FLOATS else total // hvd.size()
                expected = mean.to(given.dtype)
                for options in ({}, {"average": True}, {"op": hvd.Average}):
                    expect(hvd.allreduce(given, **options), expected, f"{dtype} {shape}")
                expect(hvd.allreduce(given, average=False), total.to(given.dtype))
                expect(hvd.allreduce_(given), expected)


@pytest.mark.native("Horovod does not add every dtype; see test_torch_on_horovod.py")
@SIZES
def test_the_average_is_rounded_once_and_drops_an_integers_fraction(size: int) -> None:
    run_ranks(size, average_everything)


def average_the_largest_integers(transport: str) -> None:
    with joined(transport):
        size = hvd.size()
        for dtype in INTEGERS:
            most, kind = int(np.iinfo(dtype).max), getattr(torch, dtype)
            small, large = torch.full((3,), most, dtype=kind), torch.full((2 * size, 9001), most, dtype=kind)
            for mean in [hvd.allreduce(small), hvd.allreduce(large), *hvd.grouped_allreduce([small, small])]:
                expect(mean, torch.full(mean.shape, most, dtype=kind), dtype)
            expect(hvd.reducescatter(large), large[:2], dtype)
            expect(hvd.allreduce(small, postscale_factor=0.25), torch.full((3,), most // 4, dtype=kind), dtype)
            wrapped = np.full(3, most, dtype) * np.array(size, dtype)  # as Horovod has it
            expect(hvd.allreduce(small, op=hvd.Sum), torch.from_numpy(wrapped), dtype)


@pytest.mark.native("Horovod does not add every dtype; see test_torch_on_horovod.py")
@pytest.mark.parametrize(
    "transport", quick_ones([*TRANSPORTS, "hierarchical_over_gloo"], "auto", "hierarchical_over_gloo")
)
def test_averages_of_integers_do_not_wrap_and_sums_do(transport: str) -> None:
    run_ranks(3, average_the_largest_integers, transport)


def average_large_numbers() -> list[torch.Tensor]:
    with joined():
        even = 2**53 + 2 * hvd.rank()
        return [
            hvd.allreduce(torch.tensor(even)),
            hvd.allreduce(torch.tensor(-7 - hvd.rank())),
            hvd.allreduce(torch.tensor(60_000.0, dtype=torch.float16)),
        ]


def test_averages_are_exact_where_sums_are_too_large_for_the_dtype() -> None:
    for whole, negative, half in run_ranks(2, average_large_numbers):
        assert whole == 2**53 + 1 and whole.dtype == torch.int64
        assert negative == -7  # of -15 / 2
        assert half == 60_000


def scale_everything() -> None:
    with joined():
        rank, size = hvd.rank(), hvd.size()
        for dtype in FLOATS:
            given, total = tensor_of(rank, (4, 7), dtype), sum_of(size, (4, 7), "float64")
            factors: dict[str, Any] = {"prescale_factor": 0.5, "postscale_factor": 4.0}
            expect(hvd.allreduce(given, op=hvd.Sum, **factors), (2 * total).to(given.dtype))
            mean = hvd.allreduce(given, op=hvd.Average, **factors)
            unit = torch.finfo(given.dtype).eps
            torch.testing.assert_close(mean, (total * (2 / size)).to(given.dtype), rtol=unit, atol=0)
            for op in ("min", "max"):
                extreme = sum_of(size, (4, 7), dtype, op)
                expect(hvd.allreduce(given, op=KINDS[op], **factors), 2 * extreme)
            product = hvd.allreduce(torch.full((3,), 2.0, dtype=given.dtype), op=hvd.Product, **factors)
            expect(product, torch.full((3,), 4.0, dtype=given.dtype))
            expect(hvd.allreduce_(given, op=hvd.Sum, prescale_factor=0.25), (total / 4).to(given.dtype))
        whole = tensor_of(rank, (4, 7), "int32")
        expected = (sum_of(size, (4, 7), "float64") * 0.5).to(torch.int32)
        expect(hvd.allreduce(whole, op=hvd.Sum, postscale_factor=0.5), expected)
        # As in Horovod each rank drops its fraction before the sum.
        halves = torch.stack([(tensor_of(one, (4, 7), "int32") * 0.5).to(torch.int32) for one in range(size)])
        expect(hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5), halves.sum(0).to(torch.int32))
        half = hvd.allreduce(2 * whole, op=hvd.Max, prescale_factor=0.5)
        expect(half, sum_of(size, (4, 7), "int32", "max"))


@pytest.mark.native("Horovod does not add every dtype; see test_torch_on_horovod.py")
@SIZES
def test_factors_before_and_after(size: int) -> None:
    run_ranks(size, scale_everything)


def reduce_strange_layouts() -> None:
    with joined():
        rank, size = hvd.rank(), hvd.size()
        for shape in ((4, 6, 5, 3), (4, 64, 32, 8)):
            plain, total = tensor_of(rank, shape, "float32"), sum_of(size, shape, "float32")
            layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [
                lambda x: x.to(memory_format=torch.channels_last),
                lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
                lambda x: torch.stack([x, x], -1)[..., 0],
                lambda x: x.flip(0).flip(0),
            ]
            for lay_out in layouts:
                expect(hvd.allreduce(lay_out(plain), op=hvd.Sum), total)
                given = lay_out(plain.clone())
                assert hvd.allreduce_(given, op=hvd.Sum) is given
                expect(given, total)
                # Ranks may lay the same tensor out differently: elements are matched by index.
                mixed = lay_out(plain) if rank == 0 else plain
                expect(hvd.allreduce(mixed, op=hvd.Sum), total)
                expect(hvd.broadcast(lay_out(plain), size - 1), tensor_of(size - 1, shape, "float32"))
            turned = torch.tensor([1 + 1j * rank]).conj()  # bit of a view: its memory holds 1 + rank j
            if os.environ.get("HVDKIT_ENGINE") != "horovod":  # whose core adds no complex numbers
                expect(hvd.allreduce(turned, op=hvd.Sum), torch.tensor([size - 1j * sum(range(size))]))
            expect(hvd.broadcast_(turned, size - 1), torch.tensor([1 - 1j * (size - 1)]))
            expect(hvd.allgather(turned.imag), torch.full((size,), 1.0 - size))
            expanded = torch.tensor([float(rank)]).expand(5, 7)
            expect(hvd.allreduce(expanded, op=hvd.Sum), torch.full((5, 7), float(sum(range(size)))))
            assert hvd.allreduce(plain[1:3], op=hvd.Sum).is_contiguous()


@SIZES
def test_any_layout_in_memory_is_reduced_by_index(size: int) -> None:
    run_ranks(size, reduce_strange_layouts)


def refuse_what_makes_no_sense() -> None:
    with joined():
        ones = torch.ones(3)
        for form in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
            name = re.escape(form.__name__)
            with pytest.raises(ValueError, match=rf"^{name}\(\): average=True and op=hvd.Sum were both given"):
                form(ones, average=True, op=hvd.Sum)
            wrongs: tuple[Any, ...] = ("sum", [])
            for wrong in wrongs:
                with pytest.raises(TypeError, match=rf"^{name}\(\): op is .*; use hvd\.Average"):
                    form(ones, op=wrong)
        for dtype, op, what in (
            (torch.complex32, hvd.Sum, "complex32 cannot be sent"),
            (torch.complex64, hvd.Max, r"allreduce\(\): op max of complex64"),
            (torch.float8_e4m3fn, hvd.Average, r"allreduce\(\): op average of float8_e4m3fn"),
            (torch.float8_e5m2, hvd.Sum, r"allreduce\(\): op sum of float8_e5m2"),
        ):
            with pytest.raises(TypeError, match=what):
                hvd.allreduce(torch.zeros(3, dtype=dtype), op=op)
        with pytest.raises(TypeError, match=r"reducescatter.*op sum of float8_e5m2"):
            hvd.reducescatter(torch.zeros(6, dtype=torch.float8_e5m2), op=hvd.Sum)
        with pytest.raises(NotImplementedError, match=r"op is hvd\.Max"):
            hvd.reducescatter(torch.zeros(6), op=hvd.Max)
        for call in (hvd.allreduce, hvd.allreduce_):
            with pytest.raises(TypeError, match=r"bool tensors .*hvd\.Max"):
                call(torch.ones(3, dtype=torch.bool))
        with pytest.raises(TypeError, match=r"hvd\.Compression\.fp16"):
            hvd.allreduce(ones, compression=object())  # type: ignore[arg-type]
        for root in (-1, hvd.size()):
            with pytest.raises(ValueError, match=f"root_rank is {root}"):
                hvd.broadcast(ones, root)
            with pytest.raises(ValueError, match=f"root_rank is {root}"):
                hvd.broadcast_(ones, root)
        expect(hvd.allreduce(ones), ones)


@SIZES
def test_arguments_that_make_no_sense_are_refused_before_anything_is_sent(size: int) -> None:
    run_ranks(size, refuse_what_makes_no_sense)


# compression --------------------------------------------------------------------------------------------------------


def compress_everything(transport: str) -> None:
    with joined(transport):
        size = hvd.size()
        compressors = {torch.float16: hvd.Compression.fp16, torch.bfloat16: hvd.Compression.bf16}
        for wire, compressor in compressors.items():
            largest, unit = torch.finfo(wire).max, torch.finfo(wire).eps
            for dtype in (torch.float32, torch.float64):
                # Numbers that fit the wire come back as they are.
                for count in (0, 5, 50_000):
                    given = torch.from_numpy(pattern(hvd.rank(), count)).to(dtype)
                    made = hvd.allreduce(given, op=hvd.Sum, compression=compressor)
                    expect(made, torch.from_numpy(reduced(size, count)).to(dtype))
                third = torch.full((7,), 1 / 3, dtype=dtype)
                made = hvd.allreduce(third, compression=compressor)
                assert made.dtype == dtype and not torch.equal(made, third)
                torch.testing.assert_close(made, third, rtol=2 * unit, atol=0)
                extreme = torch.tensor([1e38, -1e38, largest, torch.inf, -torch.inf, torch.nan], dtype=dtype)
                made = hvd.allreduce(extreme, compression=compressor)
                assert torch.isfinite(made[:3]).all() and made[3] == torch.inf and made[4] == -torch.inf
                assert torch.isnan(made[5])
                within = min(1e38, largest)
                torch.testing.assert_close(made[0].item(), within, rtol=2 * unit, atol=0)
            for narrow in (torch.float16, torch.bfloat16, torch.int32):
                given = torch.full((3,), 7, dtype=narrow)
                expect(hvd.allreduce(given, compression=compressor), given)
        exact = torch.full((3,), 1 / 3)
        expect(hvd.allreduce(exact, op=hvd.Max, compression=hvd.Compression.none), exact)


@pytest.mark.native("Horovod adds no bfloat16")
@SIZES
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_compression_rounds_and_clamps_and_keeps_inf_and_nan(transport: str, size: int) -> None:
    run_ranks(size, compress_everything, transport)


def test_a_compressor_by_hand_gives_the_dtype_back() -> None:
    for compressor, dtype in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        for given in (torch.tensor([1.5, 1e39, -torch.inf]).double(), torch.tensor([2.5])):
            small, context = compressor.compress(given)
            assert small.dtype == dtype and compressor.decompress(small, context).dtype == given.dtype
        for kept in (torch.tensor([7]), torch.tensor([True]), torch.ones(2, dtype=torch.float16)):
            small, context = compressor.compress(kept)
            assert small is kept and compressor.decompress(small, context).dtype == kept.dtype


# autograd -----------------------------------------------------------------------------------------------------------


def differentiate() -> None:
    with joined():
        rank, size = hvd.rank(), hvd.size()
        weight = torch.arange(3.0) + rank
        mean_weight, sum_weight = (torch.arange(3.0) + (size - 1) / 2), torch.arange(3.0) * size + sum(range(size))

        def gradient(call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            leaf = torch.ones(3, requires_grad=True)
            (call(leaf) * weight).sum().backward()
            assert leaf.grad is not None
            return leaf.grad

        expect(gradient(lambda x: hvd.allreduce(x)), mean_weight)
        expect(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)), sum_weight)
        expect(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, postscale_factor=0.5)), sum_weight / 2)
        expect(gradient(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum)), sum_weight)
        expect(gradient(lambda x: hvd.broadcast(x, size - 1)), mean_weight * (rank == size - 1))
        with pytest.raises(NotImplementedError, match=r"hvd\.Max has no gradient"):
            gradient(lambda x: hvd.allreduce(x, op=hvd.Max))

        # Rank r gives r rows; row i of the joined tensor has the weight i + rank on each rank.
        leaf = torch.ones(rank, 2, requires_grad=True)
        joined_rows = hvd.allgather(leaf)
        rows = torch.arange(float(len(joined_rows)))
        ((rows + rank)[:, None] * joined_rows).sum().backward()
        mine = rows[sum(range(rank)) : sum(range(rank + 1))]
        assert leaf.grad is not None
        expect(leaf.grad, (mine + (size - 1) / 2)[:, None].expand(rank, 2))

        scalar = torch.tensor(2.0, requires_grad=True)
        (hvd.allgather(scalar) * torch.arange(float(size))).sum().backward()
        assert scalar.grad is not None
        expect(scalar.grad, torch.tensor(float(rank)))


@SIZES
def test_gradients_flow_through_allreduce_allgather_and_broadcast(size: int) -> None:
    run_ranks(size, differentiate)


def change_what_autograd_has_kept() -> None:
    with joined():
        kept = torch.ones(3)
        leaf = torch.ones(3, requires_grad=True)
        product = (leaf * kept).sum()
        hvd.allreduce_(kept)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        parameter = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
        assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter
        expect(parameter.detach(), torch.full((3,), float(sum(range(hvd.size())))))
        assert parameter.requires_grad and parameter.grad_fn is None


@SIZES
def test_in_place_changes_are_known_to_autograd(size: int) -> None:
    run_ranks(size, change_what_autograd_has_kept)


# allgather and broadcast --------------------------------------------------------------------------------------------


def gather_everything(transport: str) -> None:
    with joined(transport):
        rank, size = hvd.rank(), hvd.size()
        row_counts: list[Callable[[int], int]] = [lambda r: 3, lambda r: r, lambda r: 5 * (r == size - 1), lambda r: 0]
        for dtype in DTYPES:
            for rows in row_counts:
                for rest in ((), (2,), (0, 3), (4, 1, 3)):
                    parts = [tensor_of(r, (rows(r), *rest), dtype) for r in range(size)]
                    expect(hvd.allgather(parts[rank]), torch.cat(parts), f"{dtype} {rest}")
            scalars = [tensor_of(r, (), dtype) for r in range(size)]
            expect(hvd.allgather(scalars[rank]), torch.stack(scalars))
        for bits in FLOAT8:  # every value, of every variant that torch has
            if hasattr(torch, bits):
                every = torch.arange(256, dtype=torch.uint8).roll(rank).view(getattr(torch, bits))
                exchanged, _ = hvd.alltoall(every, [256] + [0] * (size - 1))
                every_rank = [hvd.allgather(every), hvd.broadcast(every, 0)]
                for moved in [*every_rank, exchanged] if rank == 0 else every_rank:
                    assert moved.dtype is every.dtype
                    expect(moved.view(torch.uint8)[:256], torch.arange(256, dtype=torch.uint8))
        turned = [tensor_of(r, (60, 1 + r), "float32").t() for r in range(size)]
        expect(hvd.allgather(turned[rank]), torch.cat(turned))
        large = [tensor_of(r, (1000 * r, 30), "float32") for r in range(size)]
        expect(hvd.allgather(large[rank]), torch.cat(large))


@SIZES_AND_TRANSPORTS
def test_allgather_joins_uneven_and_empty_parts(transport: str, size: int) -> None:
    run_ranks(size, gather_everything, transport)


def gather_what_does_not_fit() -> list[str]:
    with joined():
        last = hvd.rank() == hvd.size() - 1
        pairs = [
            (torch.ones(2, 3), torch.ones(2, 4)),
            (torch.ones(2, 3), torch.ones(2, 3, 1)),
            (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        ]
        messages = []
        for usual, odd in pairs:
            with pytest.raises(HorovodInternalError) as caught:
                hvd.allgather(odd if last else usual)
            messages.append(str(caught.value))
        with pytest.raises(TypeError, match="complex32 cannot be sent"):
            hvd.allgather(torch.ones(2, dtype=torch.complex32))
        expect(hvd.allgather(torch.ones(1)), torch.ones(hvd.size()))
        return messages


@pytest.mark.native("Horovod names neither ranks nor hosts")
@pytest.mark.parametrize("size", [2, 3])
def test_parts_that_do_not_fit_are_an_error_on_every_rank(size: int) -> None:
    answers = run_ranks(size, gather_what_does_not_fit)
    assert all(answer == answers[0] for answer in answers)
    for message, seen in zip(answers[0], ["[2, 4]", "[2, 3, 1]", "float64"], strict=True):
        assert "rank 0 (host" in message and f"rank {size - 1} (host" in message and f"has {seen}" in message


def broadcast_everything(transport: str) -> None:
    with joined(transport):
        for root in range(hvd.size()):
            for dtype in DTYPES:
                for shape in (*SHAPES, LARGE):
                    given = tensor_of(hvd.rank(), shape, dtype)
                    before, expected = given.clone(), tensor_of(root, shape, dtype)
                    expect(hvd.broadcast(given, root), expected, f"{dtype} {shape} from {root}")
                    expect(given, before)
                    assert hvd.broadcast_(given, root) is given
                    expect(given, expected)
            turned = tensor_of(hvd.rank(), (5, 6), "float32").t()
            assert hvd.broadcast_(turned, root) is turned
            expect(turned, tensor_of(root, (5, 6), "float32").t())


@SIZES_AND_TRANSPORTS
def test_broadcast_from_every_root(transport: str, size: int) -> None:
    run_ranks(size, broadcast_everything, transport)


def _no_numbers() -> None:
    hvd.init()
    row, table = torch.ones(3), torch.eye(3)
    refused: list[tuple[Any, str]] = [
        ([1.0, 2.0], r"takes torch tensors, not list\. Pass torch\.tensor"),
        (3.0, "takes torch tensors, not float"),
        (table.to_sparse(), r"takes dense tensors, and this one is sparse \(torch.sparse_coo\). Use hvd.sparse_all"),
        (table.to_sparse().requires_grad_(), "takes dense tensors"),
        (table.to_sparse_csr(), "takes dense tensors"),
        (torch.nested.nested_tensor([row, row[:2], row], layout=torch.jagged), "takes no nested tensors"),
        (torch.empty(3, device="meta"), "takes tensors that have numbers, and this one is on the meta device"),
    ]
    for given, said in refused:
        for name in ("allreduce", "allgather", "alltoall", "reducescatter", "broadcast"):
            more = (0,) if name == "broadcast" else ()
            forms = [name, f"{name}_async"]
            if name in ("allreduce", "broadcast"):
                forms += [f"{name}_", f"{name}_async_"]
            for form in forms:
                with pytest.raises(TypeError, match=rf"^{form}\(\) {said}"):
                    getattr(hvd, form)(given, *more)
            if isinstance(given, torch.Tensor) and name != "broadcast" and name != "alltoall":
                with pytest.raises(TypeError, match=rf"^grouped_{name}\(\) {said}"):
                    getattr(hvd, f"grouped_{name}")([row, given])
        for name in ("allreduce", "reducescatter"):
            with pytest.raises(TypeError, match=rf"^{name}\(\) {said}"):
                getattr(hvd, name)(given, compression=hvd.Compression.fp16)
    with pytest.raises(TypeError, match=r"takes sparse COO tensors, not one of layout torch\.strided"):
        hvd.sparse_allreduce_async(row, "s", hvd.Sum)
    assert hvd.allreduce(row, op=hvd.Sum).tolist() == [float(hvd.size())] * 3
    hvd.shutdown()


@pytest.mark.ranks
@pytest.mark.native("Horovod's core refuses such tensors in words of its own")
def test_what_has_no_numbers_is_refused_with_the_cure() -> None:
    run_ranks(3, _no_numbers)


def _resizable() -> list[str]:
    """The names of the tensors that cannot be resized after operations and steps, because numpy() was called."""
    hvd.init(check_replicas=1)
    found: dict[str, torch.Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        found[f"{dtype}"] = hvd.broadcast_(torch.ones(6, dtype=dtype), root_rank=0)
        hvd.allgather(found[f"{dtype}"])
    found["sum"] = hvd.allreduce_(torch.ones(300_000), op=hvd.Sum)
    model = torch.nn.Linear(300, 300)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found |= {name: parameter.data, f"gradient of {name}": parameter.grad}
        found[f"momentum of {name}"] = optimizer.state[parameter]["momentum_buffer"]
    hvd.shutdown()
    return [name for name, tensor in found.items() if not tensor.untyped_storage().resizable()]


@pytest.mark.ranks
@pytest.mark.native("Horovod's core does not use numpy")
def test_tensors_stay_resizable() -> None:
    assert run_ranks(3, _resizable) == [[]] * 3
