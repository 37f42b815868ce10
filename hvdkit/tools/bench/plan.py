"""What to measure, and the words that the options, the ranks and the report share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdkit.errors import BenchError

#: Takes the name of the work, and how many rounds of how many are done.
Progress = Callable[[str, int, int], object]

KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
CPU, CUDA = DEVICES = ("cpu", "cuda")
_ALL_SIZES = tuple(4**power * 2**10 for power in range(1, 10))
#: Device -> 4 KiB to 16 MiB, or to 256 MiB.
SIZES = {CPU: _ALL_SIZES[:7], CUDA: _ALL_SIZES}
#: Device -> the library below torch.distributed.
LIBRARIES = {CPU: "Gloo", CUDA: "NCCL"}
STEPS = 15  # training steps of a peer in each round

#: Device -> the names of the models that are trained there.
MODELS = {
    CPU: ("MLP, 8 x 1024x1024", "small conv net", "101 small layers"),
    CUDA: ("ResNet-50, 64 images", "GPT-2 small, 8 x 1024 words"),
}

OURS, IN_BUCKET, NO_COMMUNICATION = "hvdkit", "hvdkit, in bucket", "no communication"
HOROVOD = "Horovod"
#: As a backend of torch.distributed.
AS_BACKEND = "hvdkit, as backend"


@dataclass(frozen=True)
class Plan:
    """What to measure.

    kind: a collective, or "step". sizes: bytes of a collective, one case each. dtype: of its elements.
    models: parts of the names of the models to train; all models if empty. rounds: each peer runs once in each.
    seconds: how long a collective is repeated in a round. threads: compute threads of each rank.
    alone: leave the peers out. device: "cpu", or "cuda" for tensors and models on each rank's GPU.
    """

    kind: str
    sizes: Sequence[int] = SIZES[CPU]
    dtype: str = "float32"
    models: Sequence[str] = ()
    rounds: int = 11
    seconds: float = 0.1
    threads: int = 1
    alone: bool = False
    device: str = CPU


def select_models(words: Sequence[str], device: str = CPU) -> list[str]:
    """Select the device's models whose names contain one of the words, in any case; all without words.

    Raises BenchError for none.
    """
    models = MODELS[device]
    names = [name for name in models if not words or any(word.lower() in name.lower() for word in words)]
    if not names:
        raise BenchError(f"No model's name contains {' or '.join(words)}. The models are: {'; '.join(models)}.")
    return names
