"""init, describe and the like, for PyTorch scripts."""

from __future__ import annotations

import torch

from hvdkit.engine.basics import Framework, local_rank
from hvdkit.engine.observe.recording import RECORDER
from hvdkit.torch.loading import watch_loaders
from hvdkit.torch.tensors import TorchArithmetic

RECORDER.when_on(watch_loaders)

FRAMEWORK = Framework(
    name="torch",
    label=f"torch {torch.__version__}",
    arithmetic=TorchArithmetic,
    count_threads=torch.get_num_threads,
    cuda=torch.version.cuda is not None,
    rocm=torch.version.hip is not None,
)
init, describe = FRAMEWORK.init, FRAMEWORK.describe
cuda_built, rocm_built = FRAMEWORK.cuda_built, FRAMEWORK.rocm_built


def local_device() -> torch.device:
    """The device of this rank: a GPU that is its own as far as there are enough, or the CPU where torch sees none.

    Right where the launcher shows each rank one GPU, some of its own, or all GPUs of the host: it is number
    `local_rank() % torch.cuda.device_count()` of those that this process sees. NotInitializedError before init().
    """
    number = local_rank()
    seen = torch.cuda.device_count()
    return torch.device("cuda", number % seen) if seen else torch.device("cpu")
