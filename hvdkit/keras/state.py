"""Starting equal: variables from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from hvdkit.engine import runtime as engine
from hvdkit.engine.groups import global_process_set
from hvdkit.engine.named.collective_step import collective_step
from hvdkit.engine.objects import allgather_object as gather
from hvdkit.errors import HorovodInternalError
from hvdkit.keras.backends import settle
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> None:
    """Overwrite variables on all ranks with root's.

    variables: Keras's or the backend's own, of the same shapes and dtypes and in the same order on all ranks, else
    HorovodInternalError on every rank, before anything is overwritten. ValueError for a root that is not there.
    """
    _spread(variables, root_rank, "")


def _spread(variables: Iterable[Any], root_rank: int, owner: str) -> None:
    """See broadcast_variables. owner: what has these variables on this rank, for the error."""
    made = engine.runtime("broadcast_variables()")
    if not 0 <= root_rank < made.world.size:
        raise ValueError(f"root_rank is {root_rank}; there are {made.world.size} ranks.")
    settle()
    given = list(variables)
    mine = owner, [f"{getattr(one, 'path', one.name)} {one.dtype} {list(one.shape)}" for one in given]

    def spread(transport: Transport, _: Sequence[int]) -> str:
        problem = _compare(gather(transport, mine), root_rank)
        if problem:
            return problem
        for variable in given:
            array = np.array(keras.ops.convert_to_numpy(variable), order="C", copy=True)
            transport.broadcast(Buffer(array.reshape(-1).view(np.uint8), "uint8"), root_rank)
            if transport.rank != root_rank:
                variable.assign(array)
        return ""

    group = global_process_set.group("broadcast_variables()")
    options = [("root rank", str(root_rank))]
    problem = collective_step(group.engine, "broadcast_variables", spread, options=options)
    if problem:
        raise HorovodInternalError(problem)


def _compare(described: Sequence[tuple[str, Sequence[str]]], root_rank: int) -> str:
    """What is wrong with the ranks' variables; "" if nothing is."""
    owner, root = described[root_rank]
    for rank, (other_owner, other) in enumerate(described):
        if [_kind(one) for one in other] == [_kind(one) for one in root]:
            continue
        pairs = list(zip(root, other, strict=False))
        at = next((i for i, (one, two) in enumerate(pairs) if _kind(one) != _kind(two)), len(pairs))
        seen = (
            f"The ranks hold different variables ({len(root)} on rank {root_rank}, {len(other)} on rank {rank}). "
            f"Number {at} is {root[at] if at < len(root) else 'nothing'} on rank {root_rank} and "
            f"{other[at] if at < len(other) else 'nothing'} on rank {rank}. "
        )
        if owner == other_owner:
            return f"{seen}Build the model from the same configuration on every rank."
        return (
            f"{seen}Rank {root_rank} has {owner}; rank {rank} has {other_owner}. If a rank has loaded its model from a "
            f"file, call hvd.load_model() on every rank, or compile the model with the same optimizer on the others "
            f"and call optimizer.build(model.trainable_variables) on them before the broadcast."
        )
    return ""


def _kind(description: str) -> str:
    """Dtype and shape: names hold counters of the models that a rank has made."""
    return description.partition(" ")[2]


def broadcast_model(model: keras.Model, root_rank: int = 0, local_variables: Sequence[Any] = ()) -> None:
    """Give every rank root's weights, and the state of root's optimizer if there is one.

    local_variables: weights that stay each rank's own, as seeds of dropout and the like do. Raises as
    broadcast_variables.
    """
    sync_state(model)
    local = {id(variable) for variable in local_variables}
    shared = [weight for weight in model.weights if id(weight) not in local and id(weight.value) not in local]
    _spread([*shared, *optimizer_variables(model)], root_rank, _describe_optimizer(model))


def _describe_optimizer(model: keras.Model) -> str:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return "no optimizer"
    return f"the optimizer {type(optimizer).__name__} {'with' if optimizer.built else 'that has not got'} its variables"


def broadcast_global_variables(root_rank: int) -> None:
    """Horovod's, for TensorFlow 1. Keras 3 keeps no list of all variables: this raises RuntimeError with the cure."""
    raise RuntimeError(
        f"broadcast_global_variables({root_rank}): Keras 3 keeps no list of all variables. Use "
        f"hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank}) in fit, or "
        f"hvd.broadcast_model(model, {root_rank})."
    )


def optimizer_variables(model: keras.Model) -> list[Any]:
    """What the model's optimizer remembers; nothing if it has none or has not been built."""
    optimizer = getattr(model, "optimizer", None)
    return list(optimizer.variables) if optimizer is not None and optimizer.built else []


def sync_state(model: keras.Model) -> None:
    """Have the variables hold what the training has come to: while an epoch runs on JAX, they do not."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
