"""What a rank of a world that may change lets hvdrun know, through the agent that started it."""

from __future__ import annotations

import os

from hvdkit.log import logger

#: The rank has joined the others; its training is over.
READY, OVER = "ready", "over"


def tell_hvdrun(word: str, descriptor: int) -> None:
    """Say it; returns at once. descriptor: of a pipe to the agent, -1 for none."""
    if descriptor < 0:
        return
    try:
        os.write(descriptor, f"{word}\n".encode())
    except OSError as error:
        logger.warning("hvdrun cannot be told that this rank is %s: %s", word, error.strerror)
