"""BroadcastGlobalVariablesCallback: the start of a training on many ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from hvdkit.engine import runtime as engine
from hvdkit.keras.replicas import FitCheck
from hvdkit.keras.state import broadcast_model
from hvdkit.log import logger


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcast the weights and optimizer state of rank root_rank to all ranks when fit() starts.

    It also prepares fit() for several ranks: only rank 0 shows a progress bar, for any value of `verbose`; every
    HVDKIT_CHECK_REPLICAS steps it checks that all ranks have equal variables; and on TensorFlow it turns jit_compile
    off, because XLA cannot compile communication there. Rank 0 logs this.

    root_rank: a rank of the job. device: accepted as in Horovod, and ignored. local_variables: a variable of the model,
    or several, that each rank keeps (ValueError for anything else).
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        variables = () if local_variables is None else local_variables
        single = hasattr(variables, "assign") or not isinstance(variables, Iterable)
        self._local = [variables] if single else list(variables)
        if wrong := [value for value in self._local if not hasattr(value, "assign")]:
            raise ValueError(
                f"BroadcastGlobalVariablesCallback(): local_variables holds {wrong[0]!r}; it must hold variables of "
                f"Keras or TensorFlow only."
            )
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False

    def register_local_var(self, var: Any) -> None:
        """Exclude this variable from the broadcast, as one of local_variables."""
        self._local.append(var)

    def set_params(self, params: dict[str, Any]) -> None:
        """Store the parameters; fit() passes one dict to all callbacks, to the progress bar last."""
        if params and params.get("verbose") and engine.runtime("fit()").world.rank != 0:
            params["verbose"] = 0
        super().set_params(params)

    def set_model(self, model: keras.Model) -> None:
        """Store the model, and prepare fit() for several ranks."""
        super().set_model(model)
        if keras.backend.backend() == "tensorflow" and model.jit_compile:
            model.jit_compile = False
            if engine.runtime("fit()").world.rank == 0:
                logger.warning(
                    "XLA cannot compile communication between ranks, so hvdkit has turned jit_compile off for the "
                    "model %s. To avoid this warning, pass jit_compile=False to model.compile().",
                    model.name,
                )

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, unless the model gets its variables with the first batch."""
        self.broadcast_done = False
        self._check, self._steps_done = FitCheck(self.model), 0
        if self.model.built:
            optimizer = getattr(self.model, "optimizer", None)
            if optimizer is not None and not optimizer.built:  # on TensorFlow the first batch builds it too
                optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first batch if necessary."""
        if batch > 0 and not self.broadcast_done:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Check that all ranks' variables are equal, if a check is due."""
        # With steps_per_execution one call covers several steps; the next epoch counts from 0 again.
        steps = batch + 1 - self._steps_done if batch >= self._steps_done else batch + 1
        self._steps_done = batch + 1
        if self.broadcast_done:
            self._check.stepped(self, steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Broadcast at the end of a one-batch epoch."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        broadcast_model(self.model, self.root_rank, local_variables=self._local)
        self.broadcast_done = True
