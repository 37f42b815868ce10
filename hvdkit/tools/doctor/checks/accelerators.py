"""GPUs that nobody would use, or that are named and are not there."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.tools.doctor.facts import Accelerators, Facts
from hvdkit.tools.doctor.finding import Finding
from hvdkit.tools.doctor.job import Job


def check_accelerators(facts: Facts, job: Job) -> Iterator[Finding]:
    """Judge GPUs and the variables that show them."""
    found = facts.accelerators
    if found.error:
        yield Finding(
            "warning",
            "gpu-driver",
            f"The GPUs' driver does not answer: {found.error}.",
            "Frameworks will not see the GPUs either. Ask your site, or load the driver; a login host needs none.",
        )
    if found.gpus and "torch" in facts.packages and not found.torch_cuda:
        yield Finding(
            "warning",
            "gpu-unused",
            f"There are {len(found.gpus)} GPUs ({found.gpus[0].name}), and torch {facts.packages['torch']} is a build "
            "for CPUs: it will not use them.",
            "Install a build of torch for CUDA: see pytorch.org/get-started.",
        )
    yield from _check_visible(found)


def _check_visible(found: Accelerators) -> Iterator[Finding]:
    if found.visible is None or not found.gpus:
        return
    words = [word.strip() for word in found.visible.split(",")]
    if words in ([""], ["-1"], ["NoDevFiles"]):
        yield Finding(
            "warning",
            "gpu-hidden",
            f"CUDA_VISIBLE_DEVICES={found.visible!r} hides all {len(found.gpus)} GPUs.",
            "Unset it, unless the job is to run on CPUs.",
        )
        return
    wrong = [word for word in words if not _exists(word, found)]
    if wrong:
        yield Finding(
            "error",
            "gpu-not-there",
            f"CUDA_VISIBLE_DEVICES={found.visible} names {', '.join(wrong)}, and this host has {len(found.gpus)} GPUs, "
            "numbered from 0: CUDA ignores that one and all after it.",
            "Correct it, or unset it and let the scheduler or hvdrun set it.",
        )
    elif len(set(words)) < len(words):
        yield Finding(
            "error",
            "gpu-twice",
            f"CUDA_VISIBLE_DEVICES={found.visible} names a GPU twice: CUDA then shows none at all.",
            "Name each GPU once.",
        )


def _exists(word: str, found: Accelerators) -> bool:
    if word.isdecimal():
        return any(gpu.index == int(word) for gpu in found.gpus)
    return word.startswith("MIG-") or any(gpu.uuid.startswith(word) for gpu in found.gpus)
