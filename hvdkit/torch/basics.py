"""init, describe and the like, for PyTorch scripts."""

from __future__ import annotations

import torch

from hvdkit.engine.basics import Framework, local_rank
from hvdkit.engine.observe.recording import RECORDER
from hvdkit.torch.device.accelerator import built_for, module_of
from hvdkit.torch.loading import watch_loaders
from hvdkit.torch.tensors import TorchArithmetic

RECORDER.when_on(watch_loaders)


def _opened_version() -> tuple[int, int, int] | None:
    from hvdkit.torch.device.groups import opened_version

    return opened_version()


FRAMEWORK = Framework(
    name="torch",
    label=f"torch {torch.__version__}",
    arithmetic=TorchArithmetic,
    count_threads=torch.get_num_threads,
    cuda=torch.version.cuda is not None,
    rocm=torch.version.hip is not None,
    nccl=_opened_version,
)
init, describe = FRAMEWORK.init, FRAMEWORK.describe
cuda_built, rocm_built = FRAMEWORK.cuda_built, FRAMEWORK.rocm_built


def local_device() -> torch.device:
    """The device of this rank: one GPU, or the CPU if torch sees no GPU.

    The GPU is number `local_rank() % count` of the `count` GPUs that this process sees, so ranks share a GPU only if
    the host has fewer GPUs than ranks. It is correct whether the launcher shows each rank one GPU or all GPUs of the
    host. Its type is that of torch's build: "cuda" also for AMD, "xpu" for Intel.
    Raises NotInitializedError before init().
    """
    number, kind = local_rank(), built_for()
    seen = module_of(kind).device_count() if kind else 0
    return torch.device(kind, number % seen) if seen else torch.device("cpu")
