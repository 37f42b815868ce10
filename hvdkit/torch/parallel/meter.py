"""The time of a training step on a mesh, for `hvdkit profile`: stages, waits of each axis, and the rest.

A step ends when the optimizer has stepped; with several optimizers, the first one that stepped counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hvdkit.engine.observe.recording import RECORDER, PlanFacts, clock
from hvdkit.engine.observe.totals import COUNTER


class Counter(Protocol):
    """A rising number of seconds."""

    seconds: float


class StepMeter:
    """Seconds of the steps of this rank; without recording it costs two comparisons per step.

    name: of the mesh. ranks: of the world. waits: of each axis's process group, and of "world".
    """

    def __init__(self, name: str, ranks: tuple[int, ...], waits: Mapping[str, Counter]) -> None:
        self._name, self._ranks, self._waits = name, ranks, waits
        self._stages: dict[str, float] = {}
        self._pipeline: tuple[int, ...] = ()
        self._facts = PlanFacts("", (), (), (), (), threaded=False)
        self._optimizer: weakref.ref[object] | None = None
        self._before: tuple[float, ...] | None = None
        self._number = 0

    def describe(self, schedule: str, ranks: int, stages: int, microbatches: int) -> None:
        """Record that a pipeline of `stages` belongs to the mesh.

        schedule: its name.
        ranks: of the pipeline.
        stages: per rank.
        microbatches: per batch.
        """
        self._name = f"{self._name}, {schedule}, {microbatches} micro-batches"
        self._pipeline = (ranks, stages, microbatches)

    def watch(self, stage: Any, number: int) -> None:
        """Count the seconds in which a torch PipelineStage computes, without its waits."""
        for method, part in (
            ("forward_one_chunk", "forward"),
            ("backward_one_chunk", "backward"),
            ("backward_weight_one_chunk", "backward"),
        ):
            setattr(stage, method, self._timed(getattr(stage, method), f"{part} {number}"))

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if not RECORDER.on:
                return call(*args, **options)
            began = clock() - self._waited_s()
            result = call(*args, **options)
            self._stages[part] = self._stages.get(part, 0.0) + clock() - self._waited_s() - began
            return result

        return timed

    def _waited_s(self) -> float:
        return sum(each.seconds for each in self._waits.values()) + COUNTER.waited_s

    def stepped(self, optimizer: object) -> None:
        """Count a step of an optimizer."""
        if not RECORDER.on:
            self._before = None
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        names = (*self._stages, *self._waits)
        waits = {axis: each.seconds for axis, each in self._waits.items()}
        waits["dp"] = waits.get("dp", 0.0) + COUNTER.waited_s
        now = (*self._stages.values(), *(waits[axis] for axis in self._waits), RECORDER.loaded_s)
        self._number += 1
        if self._before is not None and names == self._facts.parts:
            *seconds, loading_s = (new - old for new, old in zip(now, self._before, strict=True))
            RECORDER.add_parts(self._facts, self._number, clock(), loading_s, seconds)
        elif names != self._facts.parts:
            self._facts = PlanFacts(self._name, self._ranks, (), (), (), False, names, self._pipeline)
        self._before = now
