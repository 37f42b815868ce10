"""hvdkit's own engine as an EngineProvider."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.config import Config
from hvdkit.engine.named.api import Engine
from hvdkit.engine.named.engine import NamedEngine
from hvdkit.engine.observe.timeline import Timeline
from hvdkit.engine.provider import EngineProvider
from hvdkit.engine.startup import Opener, open_world
from hvdkit.transport.api import Transport
from hvdkit.transport.backend import Abort
from hvdkit.transport.rank_subset import RankSubset
from hvdkit.world import World


class NativeProvider(EngineProvider):
    """Provides hvdkit's own engine. timeline: of this process."""

    name = title = "native"
    native = True

    def __init__(self, config: Config, timeline: Timeline) -> None:
        self._config, self._timeline = config, timeline

    def open(
        self, config: Config, framework: str, subset: RankSubset | None, opener: Opener
    ) -> tuple[World, Transport, Abort | None]:
        return open_world(config, subset, opener)

    def open_engine(
        self, group: Transport, *, hosts: Sequence[str], ranks: Sequence[int], job_ranks: Sequence[int] | None
    ) -> Engine:
        return NamedEngine(group, self._config, hosts=hosts, ranks=ranks, timeline=self._timeline, job_ranks=job_ranks)
