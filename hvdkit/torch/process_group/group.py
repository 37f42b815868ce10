"""The process group that torch.distributed and its C++ code call; a transport of hvdkit does the work.

Methods have torch's names, of 2.14 and before (`_allgather_base` and the like). Tensors are on the CPU. Contiguous ones
are read and filled in place; others are copied. All methods raise TypeError and ValueError for arguments before
anything is sent, and RankLostError, which names the rank, if one has died: from the call, or from wait() if it is
asynchronous.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hvdkit.errors import TransportError
from hvdkit.torch.process_group.arguments import (
    Memory,
    Reduction,
    check_alike,
    divide_evenly,
    divide_rows,
    finish_all,
)
from hvdkit.torch.process_group.work_queue import WorkQueue
from hvdkit.torch.process_group.works import Message, Waits
from hvdkit.torch.tensors import as_tensor
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer, make_buffer

Tensor = torch.Tensor


# C++ and torch.distributed call one overload each, by position; mypy would require all of them here.
_ProcessGroup: Any = dist.ProcessGroup


class HvdkitProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group of torch.distributed over a transport, which close() closes.

    store: of the group, for torch.
    timeout_s: of a collective.

    The attribute waits: see Waits. For getGroupName() and other methods see torch.
    """

    def __init__(self, store: Store, transport: Transport, name: str, timeout_s: float) -> None:
        super().__init__(transport.rank, transport.size)  # torch's other form makes no object to derive from
        self._store, self.closed = store, False
        self.transport, self._rank, self._size = transport, transport.rank, transport.size
        self.waits = Waits()
        self._name, self._works = name, WorkQueue(name, timeout_s, transport.check, self.waits)

    def getBackendName(self) -> str:
        """Return the name under which the backend is registered."""
        return "hvdkit"

    def name(self) -> str:
        """See getBackendName()."""
        return "hvdkit"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, _device: torch.device) -> HvdkitProcessGroup:
        """Return the group, which torch 2.14 and later query for abilities such as coalescing: it has none."""
        return self

    def get_group_store(self) -> Store:
        """Return the store of the group."""
        return self._store

    @property
    def group_name(self) -> str:
        """torch's name for the group."""
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)

    def _do(self, run: Callable[[], None], outputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._works.do(run, outputs, asynchronous=getattr(opts, "asyncOp", True))

    def _collective(
        self, run: Callable[[], None], filled: Sequence[Memory], opts: Any, outputs: Sequence[Tensor] | None = None
    ) -> dist.Work:
        """Run the collective, and copy received memory back to the tensors."""
        if any(memory.flat is not memory.tensor for memory in filled):
            straight = run

            def run() -> None:
                straight()
                finish_all(filled)

        return self._do(run, [memory.tensor for memory in filled] if outputs is None else outputs, opts)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Reduce each tensor over all ranks, in place."""
        opts = dist.AllreduceOptions() if opts is None else opts
        memories = [Memory(tensor, "all_reduce", filled=True) for tensor in tensors]
        runs = [self._reducing(memory.buffer, opts.reduceOp, "all_reduce") for memory in memories]
        return self._collective(_in_turn(runs), memories, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """See allreduce()."""
        return self.allreduce(tensors, opts)

    def _reducing(self, buffer: Buffer, reduce_op: Any, call: str) -> Callable[[], None]:
        """Return a function that reduces a buffer over all ranks, in place."""
        reduction = Reduction(reduce_op, buffer.dtype, self._size, call)
        if reduction.bitwise is None:
            return functools.partial(self.transport.allreduce, buffer, reduction.op, reduction.scale)
        bitwise = reduction.bitwise

        def run() -> None:
            pieces = [make_buffer(buffer.count, buffer.dtype) for _ in range(self._size)]
            self.transport.allgather_into(pieces, buffer)
            as_tensor(buffer).copy_(functools.reduce(bitwise, map(as_tensor, pieces)))

        return run

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Reduce the tensor over all ranks, in place on the root; the tensors of other ranks do not change."""
        (tensor,) = tensors
        memory = Memory(tensor, "reduce", filled=opts.rootRank == self._rank)
        buffer = memory.buffer
        if opts.rootRank != self._rank:
            buffer = make_buffer(buffer.count, buffer.dtype)
            self.transport.arithmetic.copy(buffer, memory.buffer)
        return self._collective(self._reducing(buffer, opts.reduceOp, "reduce"), [memory], opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Fill the tensors with the root's values."""
        memories = [Memory(tensor, "broadcast", filled=opts.rootRank != self._rank) for tensor in tensors]
        transport, root = self.transport, opts.rootRank
        runs = [functools.partial(transport.broadcast, memory.buffer, root) for memory in memories]
        return self._collective(_in_turn(runs), memories, opts)

    def allgather(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Fill the outputs, one per rank, with the ranks' inputs, which may have different sizes."""
        runs, filled = [], []
        for outputs, tensor in zip(output_lists, inputs, strict=True):
            memories = [Memory(output, "all_gather", filled=True) for output in outputs]
            pieces, own = [memory.buffer for memory in memories], Memory(tensor, "all_gather").buffer
            self._check_pieces(pieces, own, "all_gather")
            runs.append(functools.partial(self.transport.allgather_into, pieces, own))
            filled += memories
        return self._collective(_in_turn(runs), filled, opts)

    def _check_pieces(self, pieces: Sequence[Buffer], own: Buffer, call: str) -> None:
        check_alike([*pieces, own], call)
        if len(pieces) != self._size:
            raise ValueError(f"{call}: {len(pieces)} tensors were passed for {self._size} ranks. Pass one for each.")
        if pieces[self._rank].count != own.count:
            raise ValueError(
                f"{call}: rank {self._rank}'s tensor has {own.count} elements, and its place in the list "
                f"{pieces[self._rank].count}. They must be equal."
            )

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather several inputs: output_lists[rank][i] gets that rank's inputs[i]."""
        return self.allgather([list(outputs) for outputs in zip(*output_lists, strict=True)], inputs, opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Fill each output (size * n elements) with the ranks' inputs (n), one after another."""
        call, runs, filled = "all_gather_into_tensor", [], []
        for output, tensor in zip(outputs, inputs, strict=True):
            memory, own = Memory(output, call, filled=True), Memory(tensor, call).buffer
            check_alike([memory.buffer, own], call)
            pieces = divide_evenly(memory.buffer, self._size, own.count, call)
            runs.append(functools.partial(self.transport.allgather_into, pieces, own))
            filled.append(memory)
        return self._collective(_in_turn(runs), filled, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """See all_gather_single_coalesced()."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], input_lists: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Fill the output with the reduction of all ranks' inputs for this rank; sizes may differ from rank to rank."""
        call, runs, filled = "reduce_scatter", [], []
        for output, inputs in zip(outputs, input_lists, strict=True):
            memory = Memory(output, call, filled=True)
            pieces = [Memory(tensor, call).buffer for tensor in inputs]
            self._check_pieces(pieces, memory.buffer, call)
            runs.append(self._scattering(memory.buffer, pieces, opts, call))
            filled.append(memory)
        return self._collective(_in_turn(runs), filled, opts)

    def _scattering(self, out: Buffer, pieces: Sequence[Buffer], opts: Any, call: str) -> Callable[[], None]:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        reduction = Reduction(opts.reduceOp, out.dtype, self._size, call)
        if reduction.bitwise is None:
            return functools.partial(self.transport.reducescatter_into, out, pieces, reduction.op, reduction.scale)
        bitwise = reduction.bitwise

        def run() -> None:
            received = [make_buffer(out.count, out.dtype) for _ in range(self._size)]
            self.transport.alltoall_into(received, pieces)
            as_tensor(out).copy_(functools.reduce(bitwise, map(as_tensor, received)))

        return run

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Fill each output (n elements) with this rank's segment of the reduction of the inputs (size * n)."""
        call, runs, filled = "reduce_scatter_tensor", [], []
        for output, tensor in zip(outputs, inputs, strict=True):
            memory, whole = Memory(output, call, filled=True), Memory(tensor, call).buffer
            check_alike([memory.buffer, whole], call)
            pieces = divide_evenly(whole, self._size, memory.buffer.count, call)
            runs.append(self._scattering(memory.buffer, pieces, opts, call))
            filled.append(memory)
        return self._collective(_in_turn(runs), filled, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """See reduce_scatter_single_coalesced()."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Send inputs[i] to rank i; outputs[i] gets what rank i sends."""
        call = "all_to_all"
        filled = [Memory(output, call, filled=True) for output in outputs]
        sent = [Memory(tensor, call).buffer for tensor in inputs]
        return self._exchange([memory.buffer for memory in filled], sent, filled, opts, call)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """As alltoall(), with the rows of one tensor.

        output: is filled.
        tensor: is sent.
        output_splits: rows from each rank, empty for equal numbers.
        input_splits: rows for each rank, empty for equal numbers.
        opts: torch's.
        """
        call = "all_to_all_single"
        filled, own = Memory(output, call, filled=True), Memory(tensor, call)
        received = divide_rows(output, filled.buffer, output_splits, self._size, call)
        sent = divide_rows(tensor, own.buffer, input_splits, self._size, call)
        return self._exchange(received, sent, [filled], opts, call)

    def _exchange(
        self, received: Sequence[Buffer], sent: Sequence[Buffer], filled: Sequence[Memory], opts: Any, call: str
    ) -> dist.Work:
        if len(received) != self._size:
            raise ValueError(f"{call}: {len(received)} outputs were passed for {self._size} ranks. Pass one for each.")
        self._check_pieces(sent, received[self._rank], call)
        check_alike([*received, *sent], call)
        return self._collective(functools.partial(self.transport.alltoall_into, received, sent), filled, opts)

    def gather(self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        """Fill the root's outputs, one per rank, with the ranks' inputs (of one size)."""
        (tensor,), root = inputs, opts.rootRank
        filled, own = [], Memory(tensor, "gather").buffer
        if root == self._rank:
            filled = [Memory(output, "gather", filled=True) for output in output_lists[0]]
            self._check_pieces([memory.buffer for memory in filled], own, "gather")
        pieces = [memory.buffer for memory in filled]
        return self._collective(functools.partial(self.transport.gather_into, pieces, own, root), filled, opts)

    def scatter(self, outputs: Sequence[Tensor], input_lists: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        """Fill every rank's output with the root's input for it (all of one size)."""
        (output,), root = outputs, opts.rootRank
        memory, pieces = Memory(output, "scatter", filled=True), []
        if root == self._rank:
            pieces = [Memory(tensor, "scatter").buffer for tensor in input_lists[0]]
            self._check_pieces(pieces, memory.buffer, "scatter")
        run = functools.partial(self.transport.scatter_into, memory.buffer, pieces, root)
        return self._collective(run, [memory], opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until every rank has called barrier()."""
        return self._do(self.transport.barrier, (), opts)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        """Begin to send the tensor to a rank of the group. tag: from 0 to 32767."""
        (tensor,) = tensors
        memory = Memory(tensor, "send")
        return Message(self.transport.isend(memory.buffer, peer, tag), tensors, None, self.waits)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        """Begin to receive the next message from a rank with this tag into the tensor."""
        (tensor,) = tensors
        memory = Memory(tensor, "recv", filled=True)
        return Message(self.transport.ireceive(memory.buffer, peer, tag), tensors, memory.finish, self.waits)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Raise an error: hvdkit's transports receive only from a given rank."""
        raise TransportError("recv: the hvdkit backend does not receive from any rank. Pass src= or group_src=.")

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def close(self) -> None:
        """Free all resources; not collective. Later calls are errors."""
        self._works.close(
            TransportError(
                f"Process group {self._name} was destroyed, or hvd.shutdown() was called. Make a new one with "
                "init_process_group() or new_group()."
            )
        )
        self.closed = True
        self.transport.close(idle=False)

    shutdown = abort = close


def _in_turn(runs: Sequence[Callable[[], None]]) -> Callable[[], None]:
    if len(runs) == 1:
        return runs[0]

    def run() -> None:
        for each in runs:
            each()

    return run
