"""Sharded checkpoints: each rank writes its shards, and any mesh loads them (torch.distributed.checkpoint)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from hvdkit.checkpoint.files import check_regular
from hvdkit.engine import runtime as engine
from hvdkit.engine.job_objects import allgather_object
from hvdkit.errors import CheckpointError
from hvdkit.parallel.saved_model import describe_difference
from hvdkit.torch.parallel.modules import put
from hvdkit.torch.parallel.pipeline import Pipeline

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter, so that any mesh finds its shards
_VALUES = "values"


def save(
    directory: str | os.PathLike[str],
    model: nn.Module | Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    **values: Any,
) -> None:
    """Save model, optimizer and values into a directory, each rank its shards; a collective call.

    directory: for this checkpoint alone, on a disk that all ranks see. An existing one is replaced when the new one is
    complete; a crash between the two renames leaves it as NAME.old, beside the new one as NAME.partial.
    model: this rank's module or pipeline.
    optimizer: its state is saved too.
    values: values that JSON can represent, such as epoch=3.

    Raises CheckpointError, on all ranks, if one could not write.
    """
    target = Path(directory)
    partial = target.with_name(target.name + ".partial")
    first = engine.runtime("parallel.save()").world.rank == 0
    problem = ""
    try:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        state: dict[str, Any] = {**_state(model, optimizer), _VALUES: json.dumps(values)}
        save_shards(state, checkpoint_id=partial)
        if first:
            old = target.with_name(target.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            if target.exists():
                target.rename(old)
            partial.rename(target)
            shutil.rmtree(old, ignore_errors=True)
    except (OSError, CheckpointException) as error:
        problem = f"parallel.save({str(directory)!r}) failed: {error}. Check that all ranks can write there."
    _raise_together(problem)


def load(
    directory: str | os.PathLike[str], model: nn.Module | Pipeline, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any] | None:
    """Load a checkpoint of save() into model and optimizer, possibly on another mesh; a collective call.

    Returns the saved values, or None if the directory does not exist. Reads pickle files: load only checkpoints that
    you trust.
    Raises CheckpointError, on all ranks and before anything is changed, for a checkpoint of another model or optimizer.
    """
    if not any(allgather_object(Path(directory).is_dir(), "parallel.load")):
        return None
    call = f"parallel.load({str(directory)!r})"
    problem = ""
    saved: dict[str, tuple[int, ...]] = {}
    try:
        check_regular(Path(directory))
        metadata = FileSystemReader(directory).read_metadata().state_dict_metadata
        saved = {
            name: tuple(entry.size) for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)
        }
    except OSError as error:
        problem = f"{call}: the directory holds no complete checkpoint ({error}). Use one that save() has written."
    _raise_together(problem)
    state = _state(model, optimizer)
    own = {f"{kind}.{name}": list(value.shape) for kind, name, value in _tensors(state)}
    needed = {name: shape for each in allgather_object(own, "parallel.load") for name, shape in each.items()}
    wanted = {name: shape for name, shape in saved.items() if optimizer is not None or name.startswith("model.")}
    if different := describe_difference(needed, wanted):
        raise CheckpointError(
            f"{call}: the checkpoint is of another model or optimizer: {different}. Build the model and the optimizer "
            "as the run that saved it did, or name another directory. Nothing was loaded."
        )
    state[_VALUES] = ""
    load_shards(state, checkpoint_id=directory)
    tree = _tree(model)
    set_model_state_dict(tree, state["model"], options=_FLAT)
    if optimizer is not None:
        set_optimizer_state_dict(tree, optimizer, state["optimizer"], options=_FLAT)
    values: dict[str, Any] = json.loads(state[_VALUES])
    return values


def _state(model: nn.Module | Pipeline, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    tree = _tree(model)
    state: dict[str, Any] = {"model": get_model_state_dict(tree, options=_FLAT)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(tree, optimizer, options=_FLAT)
    return state


def _tree(model: nn.Module | Pipeline) -> nn.Module:
    """Return one module with all of this rank's parameters, under the names of the whole model."""
    if not isinstance(model, Pipeline):
        return model
    tree = nn.Module()
    for stage in model.stages:
        for name in stage.part_names:
            put(tree, name, stage.get_submodule(name))
    return tree


def _tensors(state: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, torch.Tensor]]:
    return [
        (kind, name, value)
        for kind, entries in state.items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    ]


def _raise_together(problem: str) -> None:
    problems = [each for each in allgather_object(problem, "parallel.checkpoint") if each]
    if problems:
        raise CheckpointError(problems[0])
