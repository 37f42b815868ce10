"""The settings of --wrap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvdkit.setting import Settings, choice, parse_bool, setting


@dataclass(frozen=True, kw_only=True)
class WrapSettings(Settings):
    """The variables HVDKIT_WRAP_*, and hvdrun's options for them."""

    prefix: ClassVar[str] = "wrap"

    batch: str = setting(
        "split",
        choice("split", "multiply"),
        "with --wrap: split each batch across the ranks, or give each rank a full batch (multiply)",
        flag="--wrap-batch",
    )
    rate: str = setting(
        "linear",
        choice("linear", "sqrt", "keep"),
        "with --wrap-batch multiply: scale the learning rate by the number of ranks (linear), by its square root "
        "(sqrt), or keep it",
        flag="--wrap-rate",
    )
    warmup: float = setting(
        1.0,
        float,
        "with --wrap-batch multiply: number of epochs over which the learning rate increases to its scaled value; 0 "
        "disables the warmup",
        flag="--wrap-warmup",
        least=0,
        metavar="EPOCHS",
    )
    batch_norm: str = setting(
        "rank",
        choice("rank", "all"),
        "with --wrap: compute PyTorch's batch normalization over the rows of each rank, or over the rows of all ranks",
        flag="--wrap-batch-norm",
    )
    table: bool = setting(True, parse_bool, "with --wrap: print the table of what is changed; not with hvdrun -q")
    seed: int = setting(0, int, "with --wrap: random seed of all ranks, unless the script sets one; set by hvdrun")
