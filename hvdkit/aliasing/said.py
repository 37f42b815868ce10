"""Deprecation warnings about a script's code, each logged once, on rank 0."""

from __future__ import annotations

import functools

from hvdkit.config import read_config
from hvdkit.log import configure_logging, logger
from hvdkit.world import read_world


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning on rank 0, unless this process has logged it already."""
    world = read_world()
    if world.rank:
        return
    configure_logging(read_config().log_level, world.rank)
    logger.warning("%s", text)
