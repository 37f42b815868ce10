"""Commits of a sharded optimizer: each rank keeps the whole state, so that the loss of a rank loses nothing."""

from __future__ import annotations

from typing import Any

from hvdkit.engine import runtime as engine
from hvdkit.engine.groups import global_process_set
from hvdkit.keras.distributed import sync_of
from hvdkit.keras.sharding.optimizer import ShardedOptimizer
from hvdkit.keras.sharding.state import IS_PIECE
from hvdkit.keras.state import broadcast_object, broadcast_variables
from hvdkit.transport.buffer import Array


class SavedShards:
    """See Handler and GatheringHandler of elastic.state. The copy is the plain optimizer's saved state.

    optimizer: may be a LossScaleOptimizer around `sharded`. Raises ValueError if the state is divided among the
    ranks of a process set.
    """

    def __init__(self, optimizer: Any, sharded: ShardedOptimizer) -> None:
        if sync_of(sharded).process_set is not global_process_set:
            raise ValueError(
                "KerasState(): the optimizer's state is divided among the ranks of a process set (shard=...), and "
                "sync() is for all ranks. Leave out process_set or shard."
            )
        self._optimizer, self._sharded = optimizer, sharded
        self._gathered: dict[str, Array] | None = None
        self._saved: dict[str, Array] | None = None
        self._saved_at = -1  # number of steps at the last save

    def gather(self) -> None:
        """See GatheringHandler.gather."""
        if self._sharded.built:
            self._optimizer.gather_state()
            self._gathered = {}
            self._optimizer.save_own_variables(self._gathered)
            self._sharded._hvdkit_release()

    def save(self) -> None:
        """See Handler.save; after gather()."""
        self._saved, self._gathered = self._gathered, None
        self._saved_at = self._sharded._hvdkit_steps()

    def restore(self) -> None:
        """See Handler.restore; not collective."""
        if self._saved is not None:
            self._optimizer.load_own_variables(self._saved)
            self._sharded._hvdkit_release()

    def sync(self) -> None:
        """See Handler.sync. Divides the state among the present ranks."""
        sharded, whole = self._sharded, None
        if not sharded._hvdkit_is_divided and self._saved is not None:
            if sharded._hvdkit_steps() != self._saved_at:
                raise ValueError(
                    f"The ranks have changed after step {sharded._hvdkit_steps()}, and the last commit of the "
                    f"optimizer, whose state is divided among them, is of step {self._saved_at}. Call state.commit(), "
                    f"not only state.check_host_updates()."
                )
            whole = self._saved
        sharded._hvdkit_divide()
        if whole is not None and engine.runtime("sync()").world.rank == 0:
            self._optimizer.load_own_variables(whole)
        broadcast_variables([one for one in self._optimizer.variables if not getattr(one, IS_PIECE, False)])
        sharded._hvdkit_take_over(0, broadcast_object)
        sharded._hvdkit_release()
