"""A collective on tensors as data, the functions that run it, and the forms of a public call made from it.

A public call is written once, as a function that returns a Collective. collective() turns it into the blocking,
differentiable call; in_place() and asynchronous() make the other forms, with the same parameters.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from hvdkit.engine.groups import Group
from hvdkit.engine.named.operation import Operation, OperationRequest
from hvdkit.torch.device import operations as device_operations
from hvdkit.torch.handles import Handle, make_handle
from hvdkit.torch.refusals import refuse
from hvdkit.torch.tensors import TensorBuffer, as_buffer, contiguous, dtype_name
from hvdkit.torch.uncompiled import uncompiled
from hvdkit.transport.buffer import Buffer

Tensors = Sequence[torch.Tensor]
#: The type of Operation.rows.
Rows = Sequence[tuple[int, ...]]
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
Parameters = ParamSpec("Parameters")
Call = TypeVar("Call", bound=Callable[..., Any])


class Collective(Generic[Result_co]):
    """A collective of this rank that has not begun.

    announcement: the properties that must be equal on all ranks.
    name: None to count the calls instead.
    tensors: the caller's.
    pack: makes the caller's result of the sequence of results.
    gradient: computes the gradients of the tensors from Operation.rows and the gradients of the results.
    collect: returns the results of an operation that has them in new memory; without it the operation overwrites the
    given memory.
    overwrites: whether it does so although it has collect.
    """

    __slots__ = ("announcement", "collect", "gradient", "group", "name", "overwrites", "pack", "tensors")

    def __init__(
        self,
        group: Group,
        announcement: OperationRequest,
        name: str | None,
        tensors: Tensors,
        pack: Callable[[Any], Result_co],
        gradient: Callable[[Rows, Tensors], Tensors],
        collect: Callable[[Operation], Tensors] | None = None,
        *,
        overwrites: bool = True,
    ) -> None:
        self.group, self.announcement, self.name, self.tensors = group, announcement, name, tensors
        self.pack, self.gradient, self.collect, self.overwrites = pack, gradient, collect, overwrites

    def begin(self, *, in_place: bool) -> Handle:
        """Begin the collective; synchronize() returns the results. in_place: write them to the tensors."""
        engine = self.group.engine
        memory, operation = self._start(engine.submit, in_place)
        return make_handle(engine, operation, lambda operation: self.pack(self._finish(operation, memory, in_place)))

    def do(self, *, in_place: bool) -> Result_co:
        """Run the collective and return the results. in_place: write them to the tensors."""
        memory, operation = self._start(self.group.engine.do, in_place)
        return self.pack(self._finish(operation, memory, in_place))

    def do_differentiably(self) -> Result_co:
        """Run the collective and return the results, with a gradient if a tensor requires one."""
        for tensor in self.tensors:
            if tensor.requires_grad and torch.is_grad_enabled():
                return self.pack(_Differentiable.apply(self, *self.tensors))  # type: ignore[no-untyped-call]
        return self.do(in_place=False)

    def _start(
        self, start: Callable[[str, OperationRequest, list[Buffer]], Operation], in_place: bool
    ) -> tuple[Tensors, Operation]:
        """Start the operation; returns the memory that it uses, one tensor each, and the operation."""
        engine, kind, copied = self.group.engine, self.announcement.kind, self.overwrites and not in_place
        name = f"{kind}.{self.name}" if self.name else engine.make_name(kind)
        if not engine.takes_tensors and not device_operations.stays_on_host(self.tensors[0]):
            placed = device_operations.place(self.announcement, self.tensors, copied=copied)
            if placed is not None:
                announcement, memory, buffers = placed
                return memory, start(name, announcement, buffers)
        memory, buffers = [], []
        for tensor in self.tensors:
            if engine.takes_tensors:
                given = contiguous(tensor, copied=copied)
                buffers.append(TensorBuffer(given.view(-1), dtype_name(given)))
            else:
                given = to_host(tensor) if copied else own_memory(tensor)
                buffers.append(as_buffer(given))
            memory.append(given)
        return memory, start(name, self.announcement, buffers)

    def _finish(self, operation: Operation, memory: Tensors, in_place: bool) -> Tensors:
        """Return the results of the operation, on the devices of the tensors."""
        if operation.request.on_device:
            memory = device_operations.receive(operation, memory)
        if self.collect is not None:
            return self.collect(operation)
        pairs = zip(self.tensors, memory, strict=True)
        if in_place:
            return [_overwrite(tensor, result) for tensor, result in pairs]
        return [result if tensor.is_cpu else result.to(tensor.device) for tensor, result in pairs]


class _Differentiable(torch.autograd.Function):
    """Forward: the collective. Backward: its gradient, which consists of differentiable collectives too."""

    @staticmethod
    def forward(ctx: Any, collective: Collective[Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        memory, operation = collective._start(collective.group.engine.do, False)
        ctx.gradient, ctx.rows = collective.gradient, operation.rows
        return tuple(collective._finish(operation, memory, False))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *ctx.gradient(ctx.rows, grads)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the tensor to contiguous host memory."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if its memory is contiguous host memory, else a copy in such memory."""
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        return to_host(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def _overwrite(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return the tensor after writing the result to it, unless the result is already there."""
    if result.data_ptr() == tensor.data_ptr():
        torch.autograd.graph.increment_version(tensor)
    else:
        with torch.no_grad():
            tensor.copy_(result)
    return tensor


def collective(definition: Callable[Parameters, Collective[Result]]) -> Callable[Parameters, Result]:
    """Make the call that runs the Collective of `definition` and returns its result."""

    define = _rename(definition, definition.__name__.strip("_"))

    def form(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return define(*args, **kwargs).do_differentiably()
        except _BAD_ARGUMENTS as error:
            refuse(error, name, *args, **kwargs)
            raise

    name = definition.__name__.strip("_")
    result = definition.__annotations__["return"].removeprefix("Collective[").removesuffix("]")
    return _describe(form, definition, definition.__name__, definition.__doc__, result)


def in_place(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make the form of a collective() that overwrites its tensors with the result."""
    definition: Callable[Parameters, Collective[Result]] = call.__wrapped__  # type: ignore[attr-defined]

    def form(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return define(*args, **kwargs).do(in_place=True)
        except _BAD_ARGUMENTS as error:
            refuse(error, f"{name}_", *args, **kwargs)
            _name_form(error, name, f"{name}_")
            raise

    name = definition.__name__.strip("_")
    define = _rename(definition, f"{name}_")
    docstring = f"""Do {name}() in place: overwrite the input with the result, and return the input.

    Shapes, dtypes and arguments: as {name}(), and it raises the same errors. The input may be a slice or a
    non-contiguous view. Not differentiable.
    """
    return _describe(form, definition, f"{name}_", docstring, call.__annotations__["return"])


def asynchronous(call: Callable[Parameters, Any], *, in_place: bool = False) -> Callable[Parameters, Handle]:
    """Make the form of a collective() that returns a handle at once. in_place: as the form of in_place()."""
    definition: Callable[Parameters, Collective[Any]] = call.__wrapped__  # type: ignore[attr-defined]

    def form(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Handle:
        try:
            return define(*args, **kwargs).begin(in_place=in_place)
        except _BAD_ARGUMENTS as error:
            refuse(error, f"{name}_async{end}", *args, **kwargs)
            _name_form(error, name, f"{name}_async{end}")
            raise

    name, end = definition.__name__.strip("_"), "_" if in_place else ""
    define = _rename(definition, f"{name}_async{end}")
    docstring = f"""Start {name}{end}() and return a handle at once; synchronize(handle) returns the result.

    Shapes, dtypes and arguments: as {name}(), and it raises the same errors; but if ranks disagree, synchronize()
    raises the error. Not differentiable. Do not read or change the tensors before synchronize() has returned.
    """
    return _describe(form, definition, f"{name}_async{end}", docstring, "int")


#: Errors that a call raises for its arguments, or before init(); some are torch's own, for tensors that cannot be sent.
_BAD_ARGUMENTS = (TypeError, ValueError, AttributeError, RuntimeError)


def _name_form(error: Exception, name: str, form: str) -> None:
    """Replace the call's name at the beginning of the message by the form that the user called."""
    message = str(error)
    if message.startswith(f"{name}()"):
        error.args = (form + message.removeprefix(name),)


def _rename(definition: Call, name: str) -> Call:
    """Copy the definition under another name, for Python's errors about arguments."""
    parts = definition.__code__, definition.__globals__, name, definition.__defaults__, definition.__closure__
    copy = types.FunctionType(*parts)
    copy.__qualname__ = name
    return copy  # type: ignore[return-value]


def _describe(form: Call, definition: Callable[..., Any], name: str, docstring: str | None, result: str) -> Call:
    """Give the form a name, a docstring, and the definition's parameters for help() and inspect.signature()."""
    form = uncompiled_later(form)
    form.__name__ = form.__qualname__ = name
    form.__module__, form.__doc__ = definition.__module__, docstring
    form.__annotations__ = {**definition.__annotations__, "return": result}
    form.__wrapped__ = definition  # type: ignore[attr-defined]
    form.__signature__ = inspect.signature(definition).replace(return_annotation=result)  # type: ignore[attr-defined]
    return form


def uncompiled_later(function: Call) -> Call:
    """Apply uncompiled() as soon as the compiler is loaded; nothing is compiled before. This does not load it."""
    left_alone: list[Call] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not left_alone:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            left_alone.append(uncompiled(function))
        return left_alone[0](*args, **kwargs)

    return call  # type: ignore[return-value]
