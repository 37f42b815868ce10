"""tensor_parallel(): divides layers over the tp ranks of a mesh, by a plan of module names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hvdkit.errors import ParallelError
from hvdkit.parallel.patterns import matches, select
from hvdkit.torch.parallel.mesh import Mesh, take_mesh
from hvdkit.torch.parallel.modules import outline_of
from hvdkit.torch.parallel.pipeline import Pipeline, modules_of

Model = TypeVar("Model", nn.Module, Pipeline)

STYLES = ("column", "row", "sequence", "vocabulary", "loss")
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.Dropout)


def tensor_parallel(model: Model, plan: Mapping[str, str], *, mesh: Mesh | None = None) -> Model:
    """Divide layers over the tp ranks of the mesh, in place; returns the model. A collective call, before shard().

    plan: pattern of module names, such as "layers.*.query" -> how the layer is divided; the first match counts:
        "column"      Linear: by its outputs, of which each rank then has its own shard
        "row"         Linear: by its inputs, the shards of a "column" layer; the results are summed over the ranks
      "vocabulary"  Embedding: by its rows. Linear: by its outputs, which are then gathered
        "loss"        Linear: by its outputs, which remain sharded; compute the loss, and call backward() or step(),
                    within `with parallel.loss_parallel():`
        "sequence"    LayerNorm, RMSNorm, Dropout: each rank has its shard of dimension 1 of (batch, sequence, width).
      If a plan has such layers, activations between "row" and "column" layers are sharded in this way too, and
                      embeddings must take (batch, sequence) or (1, sequence)
    Other modules stay whole, on all ranks. Between "column" and "row" the model sees 1 / tp of the width: it must take
    the number of heads from the width (`x.unflatten(-1, (-1, head_width))`). A Linear for query, key and value together
    cannot be divided, as its shards would not be those of heads: use three. The weights of the first tp rank count.

    Raises ParallelError for a pattern without a module, an unknown style, or a layer that cannot be divided so.
    """
    mesh = take_mesh(mesh, "tensor_parallel()")
    for module in modules_of(model):
        names = outline_of(module).names
        for pattern, style in plan.items():
            if style not in STYLES:
                raise ParallelError(f"tensor_parallel(): {pattern!r} has the style {style!r}; use {', '.join(STYLES)}.")
            select("tensor_parallel()", [pattern], names)
        layers = {}
        for name, layer in module.named_modules():
            style = next((style for pattern, style in plan.items() if matches(pattern, name)), "")
            if style:
                _check(name, layer, style, mesh.tp)
                _check_parent(name, module)
                layers[name] = style
        if mesh.tp > 1:
            styles = _styles("sequence" in plan.values())
            submesh = mesh.device_mesh["tp"]
            for name, style in layers.items():
                layer = module.get_submodule(name)
                parallelize_module(layer, submesh, styles[style, isinstance(layer, nn.Embedding)])
    return model


def _styles(sequence: bool) -> dict[tuple[str, bool], ParallelStyle]:
    """Return torch's style for each plan style; True for embeddings. sequence: shard activations between layers."""
    between = Shard(1) if sequence else Replicate()
    return {
        ("column", False): ColwiseParallel(input_layouts=between),
        ("row", False): RowwiseParallel(output_layouts=between),
        ("sequence", False): SequenceParallel(),
        ("vocabulary", True): RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        ("vocabulary", False): ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
        ("loss", False): ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }


def _check(name: str, layer: nn.Module, style: str, tp: int) -> None:
    """Raise ParallelError for a layer that cannot be divided in this style."""
    if style == "sequence":
        fits, cut, size = isinstance(layer, _NORMS), "", 0
    elif isinstance(layer, nn.Embedding):
        fits, cut, size = style == "vocabulary", "num_embeddings", layer.num_embeddings
    elif isinstance(layer, nn.Linear):
        fits = True
        cut, size = ("in_features", layer.in_features) if style == "row" else ("out_features", layer.out_features)
    else:
        fits, cut, size = False, "", 0
    call = f"tensor_parallel(): {name!r}"
    if not fits:
        raise ParallelError(
            f"{call} is a {type(layer).__name__}, which cannot be {style!r}. 'column', 'row' and 'loss' are for "
            "Linear, 'vocabulary' for Embedding and Linear, 'sequence' for LayerNorm, RMSNorm and Dropout."
        )
    if size % tp:
        raise ParallelError(
            f"{call} has {cut}={size}, which tp={tp} does not divide. Use another tp, or a size that is a multiple of "
            "it (a vocabulary may have rows that nobody uses)."
        )
    if any(isinstance(parameter, DTensor) for parameter in layer.parameters()):
        raise ParallelError(f"{call} is cut already. Call tensor_parallel() once, before shard().")


def _check_parent(name: str, module: nn.Module) -> None:
    """Raise ParallelError for a layer whose weights are used without calling it."""
    path = name.split(".")
    for end in range(len(path)):
        above = module.get_submodule(".".join(path[:end]))
        if isinstance(above, nn.MultiheadAttention):
            raise ParallelError(
                f"tensor_parallel(): {name!r} is part of an nn.MultiheadAttention, which uses the weights of its "
                "layers itself. Write attention with Linear layers and "
                "torch.nn.functional.scaled_dot_product_attention."
            )
        if isinstance(above, FSDPModule):
            raise ParallelError(
                f"tensor_parallel(): {name!r} is sharded already. Call tensor_parallel() before shard()."
            )
