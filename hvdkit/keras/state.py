"""Broadcast of variables and objects, so that all ranks start equal, after the steps under way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np

from hvdkit.checkpoint.arrays import SavedVariables
from hvdkit.engine import job_objects
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.replicate import broadcast_state
from hvdkit.keras.backends import settle, uncompiled_later, view_of
from hvdkit.keras.sharding.optimizer import find_sharded
from hvdkit.keras.sharding.state import IS_PIECE
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer

T = TypeVar("T")


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> None:
    """Overwrite variables on all ranks with those of rank root_rank.

    variables: of Keras or of the backend, with the same shapes, dtypes and order on all ranks.
    Raises NotInitializedError before init(), ValueError for a root that does not exist, HorovodInternalError on every
    rank, before anything is overwritten, if the variables differ in shape, dtype or number.
    """
    _broadcast(variables, root_rank, "")


def _broadcast(variables: Iterable[Any], root_rank: int, owner: str) -> None:
    """See broadcast_variables. owner: the owner of these variables on this rank, for the error."""
    settle()
    listed = list(variables)
    if pieces := [variable.path for variable in listed if getattr(variable, IS_PIECE, False)]:
        raise ValueError(
            f"broadcast_variables(): each rank has another part of {pieces[0]}, as the optimizer has shard=.... Use "
            f"hvd.broadcast_model(model), which gives each rank its part."
        )

    def broadcast(transport: Transport) -> None:
        for variable in listed:
            array = np.array(keras.ops.convert_to_numpy(variable), order="C", copy=True)
            transport.broadcast(Buffer(array.reshape(-1).view(np.uint8), "uint8"), root_rank)
            if transport.rank != root_rank:
                variable.assign(array)

    described = [
        f"{getattr(variable, 'path', variable.name)} {variable.dtype} {list(variable.shape)}" for variable in listed
    ]
    broadcast_state(
        "broadcast_variables",
        "variables",
        described,
        broadcast,
        root_rank,
        owner=owner,
        key=_dtype_and_shape,
        cure="Build the model from the same configuration on every rank. If a rank has loaded its model from a file, "
        "call hvd.load_model() on every rank. Or, on the other ranks, compile the model with the same optimizer and "
        "call optimizer.build(model.trainable_variables) before the broadcast.",
    )


def _dtype_and_shape(description: str) -> str:
    """Remove the name, which contains counters of the rank's models."""
    return description.partition(" ")[2]


def broadcast_model(model: keras.Model, root_rank: int = 0, local_variables: Sequence[Any] = ()) -> None:
    """Overwrite the weights and the optimizer state on all ranks with those of rank root_rank.

    local_variables: weights that are not overwritten; seeds (of dropout, for example) never are. Raises what
    broadcast_variables() raises.
    """
    sync_state(model)
    local = {id(variable) for variable in local_variables}
    shared = [weight for weight in model.weights if id(weight) not in local and id(weight.value) not in local]
    _broadcast([*shared, *equal_variables(model)], root_rank, _describe_optimizer(model))
    sharded = find_sharded(getattr(model, "optimizer", None))
    if sharded is not None and sharded.built:
        sharded._hvdkit_take_over(root_rank, broadcast_object)


def _describe_optimizer(model: keras.Model) -> str:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return "no optimizer"
    return f"the optimizer {type(optimizer).__name__}, {'built' if optimizer.built else 'not built'}"


def broadcast_global_variables(root_rank: int) -> None:
    """Raise RuntimeError: Keras 3 has no list of all variables. The message names the calls to use instead."""
    raise RuntimeError(
        f"broadcast_global_variables({root_rank}): Keras 3 keeps no list of all variables. Use "
        f"hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank}) in fit(), or "
        f"hvd.broadcast_model(model, {root_rank})."
    )


def equal_variables(model: keras.Model) -> list[Any]:
    """Return the state of the model's optimizer that is equal on all ranks; empty if not built or without optimizer."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return []
    return [variable for variable in optimizer.variables if not getattr(variable, IS_PIECE, False)]


def sync_state(model: keras.Model) -> None:
    """Update the variables to the training's state: during an epoch on JAX they are outdated."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def saved_variables(owner: Any) -> SavedVariables:
    """Return the object that saves and restores the variables of a model or of an optimizer."""
    if find_sharded(owner) is not None and not isinstance(owner, keras.Model):
        raise ValueError(
            "The state of this optimizer is divided among the ranks (shard=...), and is written with the model that it "
            "belongs to only. Call model.compile(optimizer)."
        )
    if not isinstance(owner, keras.Model):
        return SavedVariables(f"The optimizer {owner.name}", lambda: owner.variables, view_of, broadcast_variables)

    def list_variables() -> Sequence[Any]:
        sync_state(owner)
        return list(owner.weights)

    return SavedVariables(f"The model {owner.name}", list_variables, view_of, broadcast_variables)


@uncompiled_later
def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Return the object of rank root_rank on every rank. obj: can be pickled; on the other ranks it is ignored.

    Raises ValueError for a root that does not exist, NotInitializedError before init().
    """
    settle()
    return job_objects.broadcast_object(obj, root_rank, name, process_set)


@uncompiled_later
def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Return the list of the objects of all ranks, in rank order, on every rank. obj: can be pickled.

    Raises NotInitializedError before init().
    """
    settle()
    return job_objects.allgather_object(obj, name)
