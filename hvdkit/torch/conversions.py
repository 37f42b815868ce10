"""Detection of parameters that were converted after the ranks had agreed on their dtype, shape and device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdkit.torch.layout import Named


class PlannedMetadata:
    """The dtype, shape and device of parameters when the ranks agreed on them.

    The order of elements in memory (channels_last) is not part of it: sources copy in the planned order. Devices are
    compared if one is not the CPU: buckets are in the memory of that device.
    """

    def __init__(self, named: Named) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._dtypes = self._read("dtype")
        self._shapes, self._devices = self._read("shape"), self._read("device")
        self._on_device = any(device.type != "cpu" for device in self._devices)

    def _read(self, what: str) -> list[Any]:
        return [getattr(parameter, what) for parameter in self._parameters]

    def check(self) -> None:
        """Raise ValueError, with the name, for a parameter that has been converted since; not collective."""
        self.check_dtypes()
        if self._read("shape") != self._shapes:
            self._refuse("shape", self._shapes)

    def check_dtypes(self) -> None:
        """Raise the same errors without comparing shapes, which takes most of the time: TorchSource checks them."""
        if [parameter.dtype for parameter in self._parameters] != self._dtypes:
            self._refuse("dtype", self._dtypes)
        if self._on_device and self._read("device") != self._devices:
            self._refuse("device", self._devices)

    def _refuse(self, what: str, planned: Sequence[Any]) -> None:
        now = self._read(what)
        changed = [at for at in range(len(planned)) if planned[at] != now[at]]
        first, more = changed[0], f" So have {len(changed) - 1} more." if len(changed) > 1 else ""
        raise conversion_error(self._names[first], what, planned[first], now[first], more)


def conversion_error(name: str, what: str, planned: Any, now: Any, more: str = "") -> ValueError:
    """Return the error for a converted parameter. what: dtype, shape, ... more: a further sentence."""
    was, has = (tuple(one) if what == "shape" else one for one in (planned, now))
    return ValueError(
        f"The parameter {name} had the {what} {was} when the ranks agreed on their parameters (in the first step, or "
        f"when parameters were added), and has the {what} {has} now.{more} Convert the model (model.double(), half(), "
        "to()) on all ranks before the first step. To convert it later, do so on all ranks, then delete the optimizer "
        "and wrap a new one, which plans anew; load_state_dict() gives it the state of the old one."
    )
