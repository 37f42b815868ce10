"""What hvdkit bench is to measure, as it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Is given what is being measured, and how many rounds of how many are done.
Tell = Callable[[str, int, int], object]

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
STEPS = 15  # of a peer's turn
SIZES = tuple(4**power * 2**10 for power in range(1, 8))  # 4 KiB to 16 MiB


@dataclass(frozen=True)
class Plan:
    """What to measure.

    kind: a collective, or "step". sizes: bytes of a collective, one case each. dtype: of its numbers.
    models: words in the names of those whose step is measured; all if empty. rounds: in which every peer has a turn.
    seconds: that a turn takes, about; of a collective. threads: that a rank computes with. alone: without peers.
    keras: the step of a model of Keras, on KERAS_BACKEND.
    """

    kind: str
    sizes: Sequence[int] = SIZES
    dtype: str = "float32"
    models: Sequence[str] = ()
    rounds: int = 11
    seconds: float = 0.1
    threads: int = 1
    alone: bool = False
    keras: bool = False
