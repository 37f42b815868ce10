"""The gradients of a list of parameters as views of the engine's buckets."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from hvdkit.engine.buckets import Bucket, TensorSpec
from hvdkit.engine.planned import PlannedReduction, Statistics
from hvdkit.engine.progress import has_spare_core
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.runtime import Runtime
from hvdkit.torch.staging import StagedBucket
from hvdkit.torch.tensors import as_tensor, dtype_name

Named = Sequence[tuple[str, torch.nn.Parameter]]


class GradientPlan:
    """Dense gradients in buckets: put there when their bucket starts, and left there as `parameter.grad`.

    named: (name, parameter), in the order in which all ranks have them. touched: indices of the parameters whose
    gradient autograd has written since the last reduction; kept by the owner.
    Opened by all ranks together; raises PlanMismatchError where their parameters differ.
    """

    def __init__(
        self, made: Runtime, named: Named, *, options: ReduceOptions, touched: Collection[int], statistics: Statistics
    ) -> None:
        self._parameters = [parameter for _, parameter in named]
        self._touched = touched
        devices = list(dict.fromkeys(parameter.device for parameter in self._parameters))
        self._moving = PlannedReduction(
            made.transport,
            [
                TensorSpec(name, one.numel(), dtype_name(one), devices.index(one.device), _layout(one))
                for name, one in named
            ],
            fill=self._fill,
            options=options,
            limit_bytes=made.config.fusion_bytes,
            threaded=_threaded(made),
            statistics=statistics,
        )
        self._staged: dict[int, StagedBucket] = {}
        self._views: list[torch.Tensor] = [torch.empty(0)] * len(self._parameters)
        for at, bucket in enumerate(self._moving.buckets):
            flat = self._flat(at, bucket)
            for slot in bucket.slots:
                self._views[slot.tensor] = _view(flat, slot.start, self._parameters[slot.tensor])

    def _flat(self, at: int, bucket: Bucket) -> torch.Tensor:
        host = as_tensor(self._moving.memory(at))
        device = self._parameters[bucket.slots[0].tensor].device
        if device.type == "cpu":
            return host
        self._staged[at] = StagedBucket(host, device)
        return self._staged[at].flat

    def arrived(self, index: int) -> None:
        """The gradient of this parameter is complete."""
        self._moving.arrived(index)

    def started(self, index: int) -> bool:
        """Is this parameter's gradient being sent? It must not be written to."""
        return self._moving.started(index)

    @property
    def under_way(self) -> bool:
        """Has anything of the present reduction been sent?"""
        return self._moving.under_way

    def holds(self, index: int) -> bool:
        """Is the parameter's gradient the one that lies in the bucket?"""
        return self._parameters[index].grad is self._views[index]

    def take_over(self) -> None:
        """Let gradients that have been reduced elsewhere live here, so that they count as common to all ranks."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and index not in self._touched:
                self._views[index].copy_(parameter.grad)
                parameter.grad = self._views[index]

    def _fill(self, at: int) -> Sequence[int]:
        """Put a bucket's gradients into its memory; returns the parameters that this rank has nothing new for."""
        absent, sources, targets = [], [], []
        for slot in self._moving.buckets[at].slots:
            parameter, view = self._parameters[slot.tensor], self._views[slot.tensor]
            gradient = parameter.grad
            if gradient is view:
                if slot.tensor not in self._touched:
                    absent.append(slot.tensor)
            elif gradient is None:
                view.zero_()
                absent.append(slot.tensor)
            else:
                sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
                targets.append(view)
                parameter.grad = view
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        if at in self._staged:
            self._staged[at].to_host()
        return absent

    def finish(self) -> None:
        """Wait until every gradient is reduced; one that another rank had and this one had not appears here as well."""
        gained = self._moving.finish()
        for staged in self._staged.values():
            staged.to_device()
        for index in gained:
            self._parameters[index].grad = self._views[index]

    def close(self) -> None:
        """Free the buckets; collective. Gradients that lie there stay readable."""
        for staged in self._staged.values():
            staged.close()
        self._moving.close()


def _threaded(made: Runtime) -> bool:
    if made.config.progress != "auto":
        return made.config.progress == "thread"
    return has_spare_core(local_size=made.world.local_size or 1, compute_threads=torch.get_num_threads())


def _layout(parameter: torch.Tensor) -> str:
    if parameter.is_contiguous():
        return ""
    for layout in (torch.channels_last, torch.channels_last_3d):
        if parameter.dim() == (4 if layout is torch.channels_last else 5) and parameter.is_contiguous(
            memory_format=layout
        ):
            return str(layout).removeprefix("torch.")
    return ""


def _view(flat: torch.Tensor, start: int, parameter: torch.Tensor) -> torch.Tensor:
    strides = parameter.stride() if _layout(parameter) else torch.empty(parameter.shape, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset() + start)
