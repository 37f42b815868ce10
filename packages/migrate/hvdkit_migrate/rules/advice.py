"""Advice on code that is correct on many ranks but could be better."""

from __future__ import annotations

import re

import libcst as cst

from hvdkit_migrate.draft import Draft
from hvdkit_migrate.script import last
from hvdkit_migrate.training import Training


def advise(draft: Draft, training: Training) -> None:
    """Give advice on batch normalization, dropout and accumulation. Only for scripts that train."""
    if not training.optimizers:
        return
    script, hvd = draft.script, draft.hvd
    for call in script.all(cst.Call):
        if re.fullmatch(r"torch\.nn\.BatchNorm[123]d", script.name(call)):
            draft.better(
                call,
                "batch normalization uses the statistics of each rank's batch, which are noisy for small batches.",
                f"model = {hvd}.SyncBatchNorm.convert_sync_batchnorm(model) before the optimizer",
            )
            break
    seeds = script.calls("torch.manual_seed")
    if seeds and "Dropout" in script.words:
        draft.better(
            seeds[0],
            "with the same seed on all ranks, dropout is the same on all ranks.",
            f"torch.manual_seed(seed + {hvd}.rank()) after the data split and the model's initialization",
        )
    names = {one.target for one in training.optimizers if one.target}
    for one in script.all(cst.If):
        steps = [call for call in script.inside(one.body, cst.Call) if last(call) == "step"]
        mine = any(isinstance(call.func, cst.Attribute) and script.code(call.func.value) in names for call in steps)
        counts = any(isinstance(part.operator, cst.Modulo) for part in script.inside(one.test, cst.BinaryOperation))
        if mine and counts and not training.trains(one):
            draft.better(
                one,
                "gradients are reduced in every backward pass of an accumulation window; once is enough.",
                f"{hvd}.DistributedOptimizer(..., backward_passes_per_step=N) for N backward passes per step",
            )
