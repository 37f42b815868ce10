"""A layout: how the work is divided over ranks. Checked against a model and a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.errors import PlanError
from hvdkit.tools.plan.cluster import Cluster
from hvdkit.tools.plan.model import Transformer

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Layout:
    """dp x tp x pp ranks.

    micro_batch: samples that pass a pipeline at once on one replica. chunks: parts of the model that a rank of the
    pipeline has; 1 is 1F1B, more is interleaved 1F1B. zero: stage of ZeRO. recompute: none, selective (the attention's
    s x s matrices) or full (all of a layer). sequence_parallel: what tensor parallelism leaves undivided is divided
    along the sequence.
    """

    dp: int
    tp: int
    pp: int
    micro_batch: int
    chunks: int = 1
    zero: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False

    @property
    def ranks(self) -> int:
        """Ranks of the whole layout."""
        return self.dp * self.tp * self.pp

    @property
    def schedule(self) -> str:
        """The pipeline's schedule in words."""
        if self.pp == 1:
            return "-"
        return "1F1B" if self.chunks == 1 else f"interleaved {self.chunks}"

    def micro_batches(self, batch: int) -> int:
        """Micro-batches of a step on each replica, of `batch` samples altogether."""
        return batch // (self.dp * self.micro_batch)

    def stages(self, model: Transformer) -> list[int]:
        """Layers of each stage; the first ones have one more if they cannot be equal."""
        each, more = divmod(model.layers, self.pp)
        return [each + (stage < more) for stage in range(self.pp)]

    def __str__(self) -> str:
        words = [f"dp {self.dp} x tp {self.tp} x pp {self.pp}"]
        words += [self.schedule] if self.pp > 1 else []
        words.append(f"micro-batch {self.micro_batch}")
        words += [f"ZeRO-{self.zero}"] if self.zero else []
        words += [f"{self.recompute} recomputation"] if self.recompute != "none" else []
        words += ["sequence parallel"] if self.sequence_parallel else []
        return ", ".join(words)


def check_layout(layout: Layout, model: Transformer, cluster: Cluster, batch: int) -> None:
    """Raise PlanError, with the cure, for a layout that cannot be trained."""
    numbers = {name: getattr(layout, name) for name in ("dp", "tp", "pp", "micro_batch", "chunks")}
    for name, number in numbers.items():
        if number < 1:
            raise PlanError(f"{name} is {number}. Give a number from 1 up.")
    if layout.ranks != cluster.gpus:
        raise PlanError(
            f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp} is {layout.ranks} ranks, but there are {cluster.gpus} "
            "GPUs. Their product must be the number of GPUs."
        )
    if model.heads % layout.tp or model.hidden % layout.tp:
        raise PlanError(
            f"tp {layout.tp} does not divide the {model.heads} attention heads and hidden {model.hidden}. "
            "Give a tp that divides both."
        )
    if layout.pp * layout.chunks > model.layers:
        raise PlanError(
            f"pp {layout.pp} x {layout.chunks} chunks need as many layers, but there are {model.layers}. Give "
            "fewer stages."
        )
    if batch % (layout.dp * layout.micro_batch):
        raise PlanError(
            f"a batch of {batch} is no multiple of dp {layout.dp} x micro-batch {layout.micro_batch}. "
            f"Give a multiple of {layout.dp * layout.micro_batch}."
        )
    if layout.chunks > 1 and (layout.pp == 1 or model.layers % (layout.pp * layout.chunks)):
        raise PlanError(
            f"{layout.chunks} chunks on pp {layout.pp} do not divide {model.layers} layers. The interleaved schedule "
            "needs a pipeline, and equal chunks."
        )
    if layout.chunks > 1 and layout.micro_batches(batch) % layout.pp:
        raise PlanError(
            f"{layout.micro_batches(batch)} micro-batches are no multiple of pp {layout.pp}, which the interleaved "
            "schedule needs. Give another micro-batch, or 1 chunk."
        )
    if layout.recompute not in RECOMPUTE:
        raise PlanError(f"recompute is {layout.recompute!r}. Give one of {', '.join(RECOMPUTE)}.")
    if layout.zero not in range(4):
        raise PlanError(f"ZeRO stage {layout.zero}: give 0, 1, 2 or 3.")
    if layout.zero > 1 and layout.pp > 1:
        raise PlanError(
            f"ZeRO-{layout.zero} with pp {layout.pp} would reduce gradients after each micro-batch. Use ZeRO-1, "
            "or pp 1."
        )
