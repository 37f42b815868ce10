"""One logger for hvdkit, each line with its rank."""

from __future__ import annotations

import logging

logger = logging.getLogger("hvdkit")

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


def configure_logging(level: str, rank: int | None = None) -> None:
    """Send hvdkit's messages of at least `level` to stderr, unless the program set up logging for hvdkit itself.

    level: trace, debug, info, warning, error, critical or fatal.
    rank: shown in each line; None for a process that is no rank.
    """
    logger.setLevel(_LEVELS[level])
    if logger.handlers:
        return
    who = "hvdkit" if rank is None else f"hvdkit rank {rank}"
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"[{who}] %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
