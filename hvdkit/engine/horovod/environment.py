"""Settings that Horovod's core reads from the environment, and from nowhere else, when it starts."""

from __future__ import annotations

import os

from hvdkit.config import Config


def variables_for(config: Config) -> dict[str, str]:
    """Horovod's variables for settings that mean the same to it."""
    told = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": f"{config.stall_check_s:.0f}",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": f"{config.stall_shutdown_s:.0f}",
    }
    if not config.stall_check_s:
        told["HOROVOD_STALL_CHECK_DISABLE"] = "1"
    if config.searches:
        told.update(HOROVOD_AUTOTUNE="1", HOROVOD_AUTOTUNE_LOG=config.autotune_log)
    if config.timeline:
        told["HOROVOD_TIMELINE"] = config.timeline
    return told


def tell_horovod(config: Config) -> None:
    """Set the variables; there is no other way to tell it."""
    os.environ.update(variables_for(config))
