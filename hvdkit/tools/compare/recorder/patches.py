"""What was put in place of other things, and can be taken back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


class Patches(ExitStack):
    """Attributes that were replaced; close() puts the old ones back."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace one."""
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
