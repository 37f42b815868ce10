"""Configures hvdkit's logger, which writes the rank in each line."""

from __future__ import annotations

import logging

logger = logging.getLogger("hvdkit")
#: The handler that hvdkit added; handlers of the program are not in this list.
_own: list[logging.Handler] = []

# Horovod's names beside Python's.
_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "fatal": logging.CRITICAL,
}


def configure_logging(level: str, rank: int | str | None = None) -> None:
    """Send hvdkit's messages of at least `level` to stderr, unless the program set up logging for hvdkit itself.

    level: trace, debug, info, warning, error, critical or fatal.
    rank: shown in each line, a number or World.label; None for a process that is not a rank. A later call replaces it.
    """
    logger.setLevel(_LEVELS[level])
    if not logger.handlers:
        _own[:] = [logging.StreamHandler()]
        logger.addHandler(_own[0])
        logger.propagate = False
    who = "hvdkit" if rank is None else f"hvdkit rank {rank}"
    for handler in _own:
        handler.setFormatter(logging.Formatter(f"[{who}] %(levelname)s: %(message)s"))
