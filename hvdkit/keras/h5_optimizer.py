"""Restores an optimizer's state from an `.h5` file of Keras 3 or Keras 2."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: A slot's name in Keras 2 (before 2.11, or since) -> its name in Keras 3, if they differ.
_SLOTS = {
    "m": "momentum",
    "v": "velocity",
    "vhat": "velocity_hat",
    "rms": "velocity",
    "mg": "average_gradient",
    "accum_grad": "accumulated_grad",
    "accum_var": "accumulated_delta_var",
}
_SLOTS_OF_ADAMAX = {**_SLOTS, "v": "norm", "u": "norm"}


def restore_optimizer(optimizer: Any, model: Any, file: Any, *, keras_2: bool) -> None:
    """Build the optimizer for the model's trained variables, and assign the state in the file.

    optimizer: not built yet.
    model: with the variables that the optimizer trains.
    file: an open h5py.File of a whole model; if it was written before the first step, it has no state, or only
    iterations and learning rate.
    keras_2: whether Keras 2 wrote the file.

    Raises ValueError if the file's variables are not those of the optimizer for this model.
    """
    unbuilt = list(optimizer.variables)
    optimizer.build(model.trainable_variables)
    variables = list(optimizer.variables)
    if "optimizer_weights" not in file:
        return
    form = importlib.import_module("keras.src.legacy.saving.legacy_h5_format")
    names = form.load_attributes_from_hdf5_group(file["optimizer_weights"], "weight_names")
    values_in_file = form.load_optimizer_weights_from_hdf5_group(file)
    saved = {name: np.asarray(value) for name, value in zip(names, values_in_file, strict=True)}
    if keras_2:
        fresh = {id(one) for one in unbuilt}
        known = _names_in_keras_2(model, file["model_weights"], form)
        values = _find_by_name(optimizer, [one for one in variables if id(one) not in fresh], saved, known)
    elif len(saved) in (len(unbuilt), len(variables)):  # Keras 3 writes the optimizer's variables, in their order
        values = list(zip(variables if len(saved) == len(variables) else unbuilt, saved.values(), strict=True))
    else:
        raise _misfit(optimizer, f"the file holds {len(saved)} variables, but the optimizer has {len(variables)}")
    for variable, value in values:
        if tuple(variable.shape) != np.shape(value):
            shapes = f"{list(np.shape(value))} in the file, but {list(variable.shape)} in the optimizer"
            raise _misfit(optimizer, f"the shape of {variable.path} is {shapes}")
    for variable, value in values:
        variable.assign(value)


def _names_in_keras_2(model: Any, group: Any, form: Any) -> dict[str, Any]:
    """Map the names in the file to the model's variables; layers are matched by order, as when Keras loads them."""
    layers = [weights for layer in model.layers if (weights := form._legacy_weights(layer))]
    named = [
        names
        for layer in form.load_attributes_from_hdf5_group(group, "layer_names")
        if (names := form.load_attributes_from_hdf5_group(group[layer], "weight_names"))
    ]
    known: dict[str, Any] = {}
    for weights, saved in zip(layers, named, strict=True):
        known.update({_plain(name): variable for name, variable in zip(saved, weights, strict=True)})
    return known


def _find_by_name(
    optimizer: Any, built: Sequence[Any], saved: Mapping[str, Any], known: Mapping[str, Any]
) -> list[tuple[Any, Any]]:
    """Return pairs of a variable of the optimizer and its value.

    optimizer: the optimizer to restore.
    built: the variables that it got by being built.
    saved: name in the file -> value.
    known: name in the file -> variable of the model.

    Keras 2 writes `Adam/m/dense/kernel` from 2.11 on and `Adam/dense/kernel/m` before, in other orders than Keras 3, no
    learning rate (its configuration has it), and momentums of an SGD without momentum.
    """
    kind = type(optimizer).__name__
    slots = {one.name: one for one in built if one is not getattr(optimizer, "_u_product", None)}
    renamed = _SLOTS_OF_ADAMAX if kind == "Adamax" else _SLOTS
    found: list[tuple[Any, Any]] = []
    for full_name, value in saved.items():
        name = _plain(full_name)
        last = name.rpartition("/")[2]
        if last in ("iter", "iteration", "iterations"):
            found.append((optimizer._iterations, value))
            if kind == "Nadam":  # not saved by Keras 2, or computed by another rule
                found.append((optimizer._u_product, _product_of_momentums(optimizer.beta_1, int(value))))
            continue
        if last == "momentum_cache":
            continue
        slot, variable = _slot_and_variable(name, known)
        path = "" if variable is None else variable.path.replace("/", "_")
        target = slots.pop(f"{path}_{renamed.get(slot, slot)}", None)
        if target is not None:
            found.append((target, value))
        elif kind != "SGD" or optimizer.momentum:
            raise _misfit(optimizer, f"the optimizer has no variable for {full_name} of the file")
    if slots and len(found) > 1:
        raise _misfit(optimizer, f"the file has no variable {next(iter(slots))}")
    return found


def _slot_and_variable(name: str, variables: Mapping[str, Any]) -> tuple[str, Any]:
    for of in sorted(variables, key=len, reverse=True):
        if name.endswith(f"/{of}"):
            return name[: -len(of) - 1].rpartition("/")[2], variables[of]
        before, _, slot = name.rpartition("/")
        if before == of or before.endswith(f"/{of}"):
            return slot, variables[of]
    return "", None


def _product_of_momentums(beta_1: float, iterations: int) -> float:
    """Nadam's product of the momentums of all steps, by the rule of Keras 3 and of Keras 2.11 and newer."""
    steps = np.arange(1, iterations + 1)
    return float(np.prod(beta_1 * (1.0 - 0.5 * 0.96**steps)))


def _plain(name: Any) -> str:
    text = name.decode() if isinstance(name, bytes) else str(name)
    return text.removesuffix(":0")


def _misfit(optimizer: Any, why: str) -> ValueError:
    return ValueError(
        f"load_model(): the optimizer state in the file does not match {type(optimizer).__name__} for the trainable "
        f"variables of the model: {why}. To train with a new optimizer, load with "
        f"keras.saving.load_model(path, compile=False) on all ranks, then compile with hvd.DistributedOptimizer()."
    )
