"""Horovod's core as an EngineProvider of hvdkit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.config import Config
from hvdkit.engine.api import Abort, Engine, EngineProvider, Opener, RankSubset, Transport
from hvdkit.world import World
from hvdkit_horovod.binding import Binding
from hvdkit_horovod.choice import built_bindings, judge_offer


class HorovodProvider(EngineProvider):
    """See EngineProvider. binding: the binding, after open()."""

    name = "horovod"
    title = "Horovod's core"
    may_change = True  # horovodrun's hosts may change, and Horovod does not report whether they can
    binding: Binding

    def offer(self, launcher: str, framework: str) -> tuple[bool, str]:
        return judge_offer(built_bindings(), framework)

    def open(
        self, config: Config, framework: str, subset: RankSubset | None, opener: Opener
    ) -> tuple[World, Transport, Abort | None]:
        from hvdkit_horovod.start import open_horovod

        world, transport, abort = open_horovod(config, framework, subset)
        self.binding, self.manager = transport.binding, transport.binding.changes
        return world, transport, abort

    def open_engine(
        self, group: Transport, *, hosts: Sequence[str], ranks: Sequence[int], job_ranks: Sequence[int] | None
    ) -> Engine:
        from hvdkit_horovod.engine import HorovodEngine

        return HorovodEngine(group, hosts=hosts, ranks=ranks, job_ranks=job_ranks)

    def close(self) -> None:
        self.binding.module.shutdown()

    def gradients_of(self, framework: str) -> Callable[..., Any] | None:
        if self.binding.framework != framework:
            return None  # buckets in host memory, which Horovod's allreduces accept
        if framework == "torch":
            from hvdkit_horovod.torch_gradients import DirectGradients

            return lambda *arguments: DirectGradients(self.binding, *arguments)
        from hvdkit_horovod.tensorflow_gradients import DirectGradients as GraphGradients

        return lambda *arguments: GraphGradients(self.binding, *arguments)

    def start_timeline(self, path: str, mark_cycles: bool) -> bool:
        self.binding.basics.start_timeline(path, mark_cycles)
        return True

    def stop_timeline(self) -> None:
        self.binding.basics.stop_timeline()

    def nccl_version(self) -> int:
        return int(self.binding.basics.nccl_built())

    def set_world_number(self, number: int) -> None:
        """See EngineProvider.

        Horovod may hold operations of a failed world, and refuses new operations of the same name.
        """
        self.binding.prefix = f"world{number}." if number else ""
