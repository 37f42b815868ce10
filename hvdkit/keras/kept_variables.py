"""Variables of Keras, kept in memory: copied into the same memory each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdkit.keras.backends import view_of
from hvdkit.keras.state import broadcast_variables, sync_state
from hvdkit.transport.buffer import Array


class KeptVariables:
    """Keeps what a function lists, the same variables each time; see elastic.state.Handler.

    what: whose they are, for errors.
    """

    def __init__(self, listed: Callable[[], Sequence[Any]], what: str) -> None:
        self._listed, self._what = listed, what
        self._saved = [np.array(view_of(one)) for one in listed()]

    @classmethod
    def of(cls, owner: Any) -> KeptVariables:
        """Those of a model or of an optimizer."""
        if not isinstance(owner, keras.Model):
            return cls(lambda: owner.variables, f"The optimizer {owner.name}")

        def listed() -> Sequence[Any]:
            sync_state(owner)
            return list(owner.weights)

        return cls(listed, f"The model {owner.name}")

    def save(self) -> None:
        """See Handler.save."""
        for kept, one in zip(self._saved, self._same(), strict=True):
            np.copyto(kept, view_of(one))

    def restore(self) -> None:
        """See Handler.restore."""
        self.assign(self._saved)

    def sync(self) -> None:
        """See Handler.sync."""
        broadcast_variables(self._same())

    def arrays(self) -> list[Array]:
        """What was saved last."""
        return self._saved

    def assign(self, arrays: Sequence[Array]) -> None:
        """Overwrite the variables."""
        for variable, value in zip(self._same(), arrays, strict=True):
            variable.assign(value)

    def _same(self) -> Sequence[Any]:
        found = self._listed()
        if len(found) != len(self._saved):
            raise ValueError(
                f"{self._what} had {len(self._saved)} variables when its state was made, and has {len(found)} now. "
                f"Build it before: with keras.Input or model.build(), or optimizer.build(model.trainable_variables)."
            )
        return found
