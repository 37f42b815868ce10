"""Patch torch right after the script has imported it."""

from __future__ import annotations

from hvdkit_wrap import (
    torch_begin,
    torch_files,
    torch_loaders,
    torch_metrics,
    torch_models,
    torch_refusals,
    torch_steps,
    torch_weights,
)


def install() -> None:
    """Patch the classes and functions of torch that a training uses."""
    torch_refusals.watch()
    torch_models.watch()
    torch_begin.watch()
    torch_loaders.watch()
    torch_weights.install(torch_begin.begin)
    torch_steps.average_plateaus()
    torch_metrics.watch()
    torch_files.watch()
