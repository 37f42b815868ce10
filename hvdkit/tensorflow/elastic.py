"""Training that can be taken up again: `hvd.elastic.TensorFlowState` and `hvd.elastic.TensorFlowKerasState`.

Both do what Horovod's do in a world that stays as it is. Worlds that shrink and grow are not there yet, and neither is
`run`, which without them would only call the function after `state.sync()`: do that yourself.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from hvdkit.elastic.state import Handler, ObjectState
from hvdkit.tensorflow.state import broadcast_object, broadcast_variables

__all__ = ["TensorFlowKerasState", "TensorFlowState"]  # noqa: F822 (the first comes from __getattr__)


class TensorFlowState(ObjectState):
    """What is to be kept of a training: `state = hvd.elastic.TensorFlowState(model.variables, epoch=0)`.

    Each argument is an attribute: `state.variables`, `state.epoch += 1`. `commit` saves them in memory, `restore` goes
    back to what was committed, `sync` gives every rank rank 0's and saves them. Lists of variables stay the variables
    they are, and only their values are saved and sent; other values are copied and pickled as a whole.

    variables: of TensorFlow or Keras, in the same order on all ranks; None for none. session: as in Horovod, must be
    None. `sync` is collective and raises what broadcast_variables does.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None:
            raise ValueError("TensorFlowState(): session belongs to TensorFlow 1, which hvdkit does not support.")
        super().__init__(broadcast_object, variables=list(variables or ()), **kwargs)

    def handler_for(self, value: Any) -> Handler | None:
        """See ObjectState.handler_for."""
        if isinstance(value, (list, tuple)) and value and all(hasattr(one, "assign") for one in value):
            return _Variables(value)
        return None


class _Variables:
    """Keeps variables by their values."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = variables
        self.save()

    def save(self) -> None:
        self._saved = [variable.numpy().copy() for variable in self._variables]

    def restore(self) -> None:
        for variable, value in zip(self._variables, self._saved, strict=True):
            variable.assign(value)

    def sync(self) -> None:
        broadcast_variables(self._variables, root_rank=0)


def __getattr__(name: str) -> Any:
    if name == "TensorFlowKerasState":  # needs Keras, and stands above this floor
        return importlib.import_module("hvdkit.keras.elastic").KerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
