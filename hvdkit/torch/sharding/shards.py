"""TorchOptimizerShards: this rank's slices of an optimizer's parameters, and their state."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvdkit.engine.groups import Group
from hvdkit.engine.named.operation import Action
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.sharding.tensor_ranges import TensorRange
from hvdkit.engine.sharding.whole_state import RangeState, gather_state
from hvdkit.engine.strategy import Parameters
from hvdkit.errors import HorovodInternalError
from hvdkit.torch.layout import strides_of
from hvdkit.torch.sharding.elementwise import find_entries
from hvdkit.torch.sharding.gradient import ShardedGradient
from hvdkit.torch.sharding.gradient_sink import TorchGradientSink
from hvdkit.torch.sharding.slices import Slice, make_slice
from hvdkit.torch.sharding.state import Layout, State, cut_state, find_flaw, from_buffers, to_buffers, with_tensors
from hvdkit.torch.state import map_nested
from hvdkit.transport.api import Transport

#: The key of a parameter's float32 values in its state.
MASTER = "master_weight"
_GRADIENT = "gradient"  # a key of the state, while parameters are divided anew
_LOAD_WHOLE = "Load what state_dict() of an optimizer of the same class and parameters has returned."


class TorchOptimizerShards:
    """See OptimizerShards. optimizer: the divided optimizer; not kept alive. master_weights: see DistributedOptimizer.

    sink: of reduce-scattered gradients; None if gradients are whole.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, master_weights: bool, sink: TorchGradientSink | None = None
    ) -> None:
        self.sink = sink
        self._optimizer = weakref.ref(optimizer)
        self._master_weights = master_weights
        self._slices: dict[torch.nn.Parameter, list[Slice]] = {}
        self._division: list[tuple[TensorSpec, TensorRange]] | None = None
        self._layouts: dict[torch.nn.Parameter, Layout] = {}  # layouts of the divided parameters
        #: Number of a parameter -> whole state, while it is known: from a load to the step after it.
        self._whole_state: dict[int, dict[str, Any]] | None = None
        self._whole_gradients: dict[int, torch.Tensor] = {}  # by number, between collect() and divide()
        self._undivided_state: dict[int, dict[str, Any]] = {}  # by number: of frozen parameters, which no rank divides

    @property
    def are_divided(self) -> bool:
        """Return whether parameters are divided among ranks; the same on all of them."""
        return self._division is not None

    @property
    def _inner(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _parameters(self) -> list[torch.nn.Parameter]:
        """The parameters by their numbers in torch's state_dict()."""
        return [parameter for group in self._inner.param_groups for parameter in group["params"]]

    def collect(self, transport: Transport) -> None:
        """See OptimizerShards.collect."""
        whole = self._gather(transport, gradients=True)
        self._whole_gradients = {number: state.pop(_GRADIENT) for number, state in whole.items() if _GRADIENT in state}
        self._whole_state = {number: state for number, state in whole.items() if state}

    def _gather(
        self, transport: Transport, root: int | None = None, *, gradients: bool = False
    ) -> dict[int, dict[str, Any]]:
        """Gather the whole state, and gradients that are reduced and not yet used."""
        parameters, inner = self._parameters(), self._inner
        ranges = []
        for number, parameter in enumerate(parameters):
            for one in self._slices.get(parameter, ()):
                state = dict(inner.state.get(one.tensor, {}))
                if one.is_master:
                    state[MASTER] = one.tensor.detach()
                if gradients and isinstance(parameter.grad, ShardedGradient):
                    state[_GRADIENT] = one.received
                ranges.append(RangeState(number, one.piece.offset, one.count, to_buffers(state, one.count)))
        layouts = [self._layouts.get(parameter) or _layout_now(parameter) for parameter in parameters]
        counts = [layout.count for layout in layouts]
        names = [self._name_of(parameter) for parameter in parameters]
        divided = [number for number, parameter in enumerate(parameters) if parameter in self._layouts]
        wanted = root is None or root == transport.rank
        whole = gather_state(transport, ranges, counts, names, divided=divided, wanted=wanted)
        return {
            **{number: from_buffers(one, layouts[number]) for number, one in whole.items()},
            **self._undivided_state,
        }

    def divide(self, parameters: Parameters, pieces: Sequence[TensorRange], group: Group) -> None:
        """See OptimizerShards.divide. Raises HorovodInternalError if it needs shards of ranks that are gone."""
        source = parameters.own_tensors("A sharded optimizer")
        division = [(parameters.tensors[piece.tensor], piece) for piece in pieces]
        if self._whole_state is None and division == self._division:
            if self.sink is not None:
                self.sink.divide(source, list(self._all_slices()), parameters.name, group)
            return
        if self._whole_state is None and any(self._inner.state.get(one.tensor) for one in self._all_slices()):
            raise HorovodInternalError(
                f"The optimizer was divided among other ranks than the {len(group.engine.ranks)} of now, or its "
                "parameters had another dtype or memory format, and these parts of its state are gone. Load a state "
                "that state_dict() returned before (elastic jobs: call state.commit(), not only "
                "state.check_host_updates())."
            )
        self._drop_slices()
        self._division = division
        self._layouts = {
            parameter: Layout(tuple(parameter.shape), strides)
            for parameter, strides in zip(source.parameters, source.strides, strict=True)
        }
        for piece in pieces:
            owner = source.parameters[piece.tensor]
            one = make_slice(owner, self._layouts[owner], piece, master_weights=self._master_weights)
            self._slices.setdefault(owner, []).append(one)
        if self.sink is not None:
            self.sink.divide(source, list(self._all_slices()), parameters.name, group)
            numbers = self._parameters()
            self.sink.restore({numbers[number]: gradient for number, gradient in self._whole_gradients.items()})
            self._whole_gradients.clear()
        if self._whole_state is not None:
            self._set_state(self._whole_state)

    def _all_slices(self) -> Iterator[Slice]:
        for slices in self._slices.values():
            yield from slices

    def _drop_slices(self) -> None:
        for one in self._all_slices():
            self._inner.state.pop(one.tensor, None)
        self._slices.clear()

    def _set_state(self, whole: Mapping[int, State]) -> None:
        """Set the state of all slices, and of undivided parameters, from the whole state."""
        parameters = self._parameters()
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._undivided_state = {at: dict(state) for at, state in whole.items() if parameters[at] not in self._layouts}
        for one in self._all_slices():
            state = cut_state(whole.get(numbers[one.owner], {}), one.layout, one.piece)
            master = state.pop(MASTER, None)
            if one.is_master and master is not None:
                one.tensor.data.copy_(master)
            if state:
                self._inner.state[one.tensor] = {name: _cast(name, value, one.tensor) for name, value in state.items()}

    def state_dict(
        self, own: Callable[[], dict[str, Any]], together: Callable[[Action], Any], root: int | None = None
    ) -> dict[str, Any]:
        """Return the whole state, as the plain optimizer's state_dict(), in host memory; collective after a step.

        own: state_dict() of the optimizer's class. together: runs an action on all ranks. root: the only rank that gets
        the state of parameters; None for all ranks.
        """
        with self.swapped():
            state = own()
        whole = self._whole_state
        if whole is None and self.are_divided:
            whole = together(lambda transport, _: self._gather(transport, root))
            if root is None:
                self._whole_state = whole
        state["state"] = {number: dict(entries) for number, entries in (whole or {}).items()}
        return {**state, "param_groups": self._pack(state["param_groups"])}

    def _pack(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Replace the slices' numbers in the groups of a state_dict() by those of parameters."""
        numbers = itertools.count()
        pairs = zip(groups, self._inner.param_groups, strict=True)
        return [{**packed, "params": [next(numbers) for _ in group["params"]]} for packed, group in pairs]

    def load_state_dict(self, own: Callable[[dict[str, Any]], None], state: Mapping[str, Any]) -> None:
        """Load a whole state; not collective, but all ranks load the same, or broadcast_optimizer_state() follows.

        own: load_state_dict() of the optimizer's class. Raises ValueError, the same on all ranks that load it, for a
        damaged state or one of other parameters; nothing is changed then.
        """
        groups = _checked_groups(state)
        sizes, saved = ([len(group["params"]) for group in some] for some in (self._inner.param_groups, groups))
        if sizes != saved:
            raise ValueError(
                f"load_state_dict(): the optimizer has parameter groups of {sizes} parameters, but the state has "
                f"groups of {saved}. {_LOAD_WHOLE}"
            )
        numbers = {key: number for number, key in enumerate(key for group in groups for key in group["params"])}
        if unknown := [key for key in state["state"] if key not in numbers]:
            raise ValueError(
                f"load_state_dict(): the state has entries of the parameters {unknown}, which are in none of its "
                f"param_groups. {_LOAD_WHOLE}"
            )
        whole = {numbers[key]: entries for key, entries in state["state"].items()}
        whole = self._checked(whole, groups)
        self.load_options(own, groups)
        self._whole_state = {
            number: map_nested(entries, torch.Tensor, lambda value: value.detach().to("cpu", copy=True))
            for number, entries in sorted(whole.items())
        }
        self._set_state(self._whole_state)

    def _checked(self, whole: Mapping[int, State], groups: Sequence[Mapping[str, Any]]) -> dict[int, State]:
        """Return the state as this version of the optimizer's class needs it. groups: of the state.

        Raises ValueError for an entry that is missing or does not fit.
        """
        inner, checked = self._inner, dict[int, State]()
        number = 0
        for group, saved in zip(inner.param_groups, groups, strict=True):
            kinds = find_entries(inner, {**group, **saved})
            for parameter in group["params"]:
                entries = whole.get(number, {})
                stepped = any(value is not None for name, value in entries.items() if name != MASTER)
                expected = {**(kinds if stepped else {}), **({MASTER: "elementwise"} if MASTER in entries else {})}
                if flaw := find_flaw(entries, tuple(parameter.shape), expected):
                    name = self._name_of(parameter)
                    which = f"parameter {number}" + (f" ({name})" if name else "")
                    raise ValueError(f"load_state_dict(): the state of {which} {flaw}. {_LOAD_WHOLE}")
                if number in whole:
                    checked[number] = with_tensors(entries, kinds)
                number += 1
        return checked

    def _name_of(self, parameter: torch.nn.Parameter) -> str:
        name: str = getattr(self._inner, "_parameter_names", {}).get(parameter, "")
        return name

    def load_options(self, own: Callable[[dict[str, Any]], None], groups: Sequence[Mapping[str, Any]]) -> None:
        """Load the learning rates and other options of the groups; the state stays. own: see load_state_dict()."""
        inner = self._inner
        state = dict(inner.state)
        whole = [group["params"] for group in inner.param_groups]
        for group in inner.param_groups:
            group["params"] = []
        try:
            own({"state": {}, "param_groups": [{**group, "params": []} for group in groups]})
        finally:
            for group, parameters in zip(inner.param_groups, whole, strict=True):
                group["params"] = parameters
        inner.state.update(state)

    def share(self, own: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the message of this rank, as the root of a broadcast, to the others; not collective.

        Its "state" is None if every rank has its shards of the state, so that only options need to be sent.
        """
        with self.swapped():
            state = own()
        whole = self._whole_state if self._whole_state is not None else (None if self.are_divided else {})
        return {**state, "state": whole, "param_groups": self._pack(state["param_groups"])}

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Context in which the optimizer's groups contain slices in place of parameters."""
        inner = self._inner
        whole = [group["params"] for group in inner.param_groups]
        for group, parameters in zip(inner.param_groups, whole, strict=True):
            group["params"] = [one.tensor for parameter in parameters for one in self._slices.get(parameter, ())]
        try:
            yield
        finally:
            for group, parameters in zip(inner.param_groups, whole, strict=True):  # groups differ after a load
                group["params"] = parameters

    def step(self, step: Callable[[], Any]) -> Any:
        """Make the inner optimizer step on the slices."""
        for one in self._all_slices():
            one.renew()
            one.tensor.grad = one.gradient()
        self._whole_state = None
        try:
            with self.swapped():
                result = step()
            with torch.no_grad():
                for one in self._all_slices():
                    one.write()
        finally:
            for one in self._all_slices():
                one.tensor.grad = None
        return result

    def gathered(self) -> None:
        """See OptimizerShards.gathered."""
        for one in self._all_slices():
            one.version = one.owner._version


def _checked_groups(state: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the param_groups of a state_dict(). Raises ValueError if it or one of them has not the keys it needs."""
    if missing := [key for key in ("state", "param_groups") if key not in state]:
        raise ValueError(
            f"load_state_dict(): the state has no {missing[0]!r}; it has {', '.join(map(repr, state)) or 'no keys'}. "
            f"{_LOAD_WHOLE}"
        )
    groups: Sequence[Mapping[str, Any]] = state["param_groups"]
    for at, group in enumerate(groups):
        if "params" not in group:
            raise ValueError(
                f"load_state_dict(): group {at} of the state's param_groups has no 'params'. {_LOAD_WHOLE}"
            )
    return groups


def _layout_now(parameter: torch.Tensor) -> Layout:
    return Layout(tuple(parameter.shape), strides_of(parameter))


def _cast(name: str, value: Any, tensor: torch.Tensor) -> Any:
    """Convert an entry of a state for a slice, as torch's load_state_dict() does for a parameter.

    The entry gets the slice's device and, if the slice is of floating point, its dtype, unless it counts steps.
    """
    if not isinstance(value, torch.Tensor) or name == "step":
        return value
    return value.to(tensor.device, tensor.dtype if tensor.is_floating_point() else value.dtype)
