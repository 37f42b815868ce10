"""A run of Weights & Biases, also offline (WANDB_MODE=offline)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.optional_import import optional_import
from hvdkit.tracking.rows import Averages
from hvdkit.tracking.writer import End

_EXIT_CODES = {None: 0, "FINISHED": 0, "FAILED": 1, "KILLED": 143}


class WandbRun:
    """A Writer. wandb: a project, or the arguments of wandb.init(). Uses an open run if there is one.

    Raises MissingDependencyError, and what wandb.init() raises.
    """

    name = "wandb"

    def __init__(self, wandb: str | Mapping[str, Any]) -> None:
        module = optional_import("wandb", "wandb")
        self._own = module.run is None
        options = {"project": wandb} if isinstance(wandb, str) else dict(wandb)
        self._run = module.init(**options) if self._own else module.run
        self.resume: Mapping[str, str] = {"id": str(self._run.id), "resume": "allow"}

    def write(self, rows: Sequence[Averages]) -> None:
        for step, values in rows:
            self._run.log(values, step=step)

    def close(self, end: End | None) -> None:
        if self._own:
            self._run.finish(exit_code=_EXIT_CODES[end])
