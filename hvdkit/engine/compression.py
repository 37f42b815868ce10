"""What a user's `compression` means: one way for all gradients, or one for each by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hvdkit.transport.buffer import Narrow
from hvdkit.transport.coding.api import Coding
from hvdkit.transport.coding.power_sgd import PowerSGD
from hvdkit.transport.coding.sign import Sign
from hvdkit.transport.coding.top_k import TopK

Wire = Narrow | Coding

#: What an optimizer takes as `compression` beside an adapter's compressors: a coding, or one for each pattern of names.
Coded = Coding | Mapping[str, Any]

CODINGS = (TopK, PowerSGD, Sign)


class Codings:
    """What every adapter's `Compression` offers beside dtypes, for an optimizer's gradients.

    `compression=hvd.Compression.TopK(0.01)` for all of them. By the parameters' names, of which the first
    pattern that fits counts: `{"embedding.*": hvd.Compression.TopK(0.01), "*": hvd.Compression.fp16}`.
    """

    TopK = TopK
    PowerSGD = PowerSGD
    Sign = Sign


@dataclass(frozen=True)
class Policy:
    """What goes over the wire by the tensor's name: (pattern, wire), of which the first that fits counts."""

    rules: tuple[tuple[str, Wire], ...]

    def wire_for(self, name: str) -> Wire:
        """Raises ValueError for a tensor that no pattern fits. An adapter's number before a name does not count."""
        plain = name.partition(" ")[2] if name.partition(" ")[0].isdigit() else name
        for pattern, wire in self.rules:
            if fnmatchcase(plain, pattern):
                return wire
        patterns = ", ".join(repr(pattern) for pattern, _ in self.rules)
        raise ValueError(
            f"compression has the patterns {patterns}, and none fits {plain!r}. Add '*' for all others, at the end."
        )


def wire_of(compression: Any) -> Narrow:
    """The wire dtype of a compressor; TypeError for something else, such as a Horovod compressor of the user's own."""
    wire = getattr(compression, "wire", None)
    if wire not in ("none", "float16", "bfloat16"):
        raise TypeError(_refuse(compression, "use hvd.Compression.none, hvd.Compression.fp16 or hvd.Compression.bf16"))
    return wire  # type: ignore[no-any-return]


def wire_of_gradients(compression: Any) -> Wire | Policy:
    """What goes over the wire for an optimizer's gradients: as wire_of, or a coding, or a Policy for a mapping."""
    if isinstance(compression, Mapping):
        return Policy(tuple((str(pattern), _wire(one)) for pattern, one in compression.items()))
    return _wire(compression)


def _wire(compression: Any) -> Wire:
    if isinstance(compression, type) and issubclass(compression, CODINGS):
        raise TypeError(f"compression is the class {compression.__name__}; make one of it, as {compression()!r}.")
    if isinstance(compression, CODINGS):
        return compression
    try:
        return wire_of(compression)
    except TypeError:
        ways = ["none", "fp16", "bf16", *(repr(kind()) for kind in CODINGS)]
        hint = "use " + ", ".join(f"hvd.Compression.{way}" for way in ways)
        raise TypeError(_refuse(compression, hint)) from None


def _refuse(compression: Any, hint: str) -> str:
    if isinstance(compression, (*CODINGS, Mapping)):
        return (
            f"compression is {compression!r}, which is for an optimizer's gradients, since it remembers from step to "
            f"step. Here {hint}."
        )
    return (
        f"compression is {compression!r}; {hint}. Compressors written for Horovod are not called by hvdkit, which "
        f"casts on the wire itself."
    )
