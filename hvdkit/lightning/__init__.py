"""hvdkit for Lightning: `import hvdkit.lightning`, then `lightning.Trainer(strategy="hvdkit")`."""

from __future__ import annotations

from hvdkit.optional_import import optional_import

optional_import("lightning", "lightning")

from hvdkit.lightning.environment import HvdkitEnvironment
from hvdkit.lightning.logger import HvdkitLogger
from hvdkit.lightning.strategy import HvdkitStrategy, register

register()

__all__ = ["HvdkitEnvironment", "HvdkitLogger", "HvdkitStrategy"]
