"""What to measure, and the words that the options, the ranks and the report share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdkit.errors import BenchError

#: Takes the name of the work, and how many rounds of how many are done.
Progress = Callable[[str, int, int], object]

KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
SIZES = tuple(4**power * 2**10 for power in range(1, 8))  # 4 KiB to 16 MiB
STEPS = 15  # training steps of a peer in each round

MODELS = ("MLP, 8 x 1024x1024", "small conv net", "101 small layers")

OURS, IN_BUCKET, NO_COMMUNICATION = "hvdkit", "hvdkit, in bucket", "no communication"


@dataclass(frozen=True)
class Plan:
    """What to measure.

    kind: a collective, or "step". sizes: bytes of a collective, one case each. dtype: of its elements.
    models: parts of the names of the models to train; all models if empty. rounds: each peer runs once in each.
    seconds: how long a collective is repeated in a round. threads: compute threads of each rank.
    alone: leave the peers out.
    """

    kind: str
    sizes: Sequence[int] = SIZES
    dtype: str = "float32"
    models: Sequence[str] = ()
    rounds: int = 11
    seconds: float = 0.1
    threads: int = 1
    alone: bool = False


def select_models(words: Sequence[str]) -> list[str]:
    """Select the models whose names contain one of the words, in any case; all without words. BenchError for none."""
    names = [name for name in MODELS if not words or any(word.lower() in name.lower() for word in words)]
    if not names:
        raise BenchError(f"No model's name contains {' or '.join(words)}. The models are: {'; '.join(MODELS)}.")
    return names
