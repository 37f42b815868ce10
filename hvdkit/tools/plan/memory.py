"""Memory of a rank by part, in bytes.

Parameters and optimizer: arXiv 1910.02054 (ZeRO), with gradients in float32 as Megatron-LM keeps them. Activations:
arXiv 2205.05198, equations 1 to 6.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.tools.plan.layout import GIB, Layout, Parts, Transformer

WEIGHT_BYTES = 2  # float16 or bfloat16
GRADIENT_BYTES = 4  # sums of micro-batches, in float32
OPTIMIZER_BYTES = 12  # Adam: master weight and two moments in float32
CONTEXT_BYTES = 2.0 * GIB  # the driver's context, NCCL's buffers, workspaces: an assumption, not a measurement


@dataclass(frozen=True)
class Memory(Parts):
    """Bytes of the rank that needs most. context: what the driver and libraries take."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    context: float = CONTEXT_BYTES

    @property
    def state(self) -> float:
        """Parameters, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer


def compute_memory(model: Transformer, layout: Layout, batch: int) -> Memory:
    """Compute the memory of the stage that needs most: the first holds most activations, the last the output layer."""
    stages = {0, layout.pp - 1}  # a stage between them has no more layers, micro-batches or embeddings than the first
    return max((_stage_memory(model, layout, batch, stage) for stage in stages), key=lambda memory: memory.total)


def stage_parameters(model: Transformer, layout: Layout, stage: int) -> float:
    """Parameters of one rank of a stage; an embedding that the output layer shares is on both ends of a pipeline."""
    first, last = stage == 0, stage == layout.pp - 1
    total = float(layout.stages(model)[stage] * model.layer_parameters)
    total += model.embedding_parameters if first else 0
    if last:
        total += model.head_parameters if not model.tied else 0 if first else model.vocabulary * model.hidden
    return total / layout.tp


def layer_activations(model: Transformer, layout: Layout) -> float:
    """Bytes that a layer keeps of one micro-batch for its backward pass.

    For GPT sbh (10 + 24 / t + 5 a s / (h t)) (arXiv 2205.05198, equation 2).
    """
    if layout.recompute == "full":
        return 2.0 * layout.micro_batch * model.sequence * model.hidden / _along_sequence(layout)
    return _kept(model, layout)


def _stage_memory(model: Transformer, layout: Layout, batch: int, stage: int) -> Memory:
    parameters, d = stage_parameters(model, layout, stage), layout.dp
    parts = {"weights": WEIGHT_BYTES, "gradients": GRADIENT_BYTES, "optimizer": OPTIMIZER_BYTES}
    shares = {"weights": layout.zero >= 3, "gradients": layout.zero >= 2, "optimizer": layout.zero >= 1}
    state = {name: parameters * size / (d if shares[name] else 1) for name, size in parts.items()}
    return Memory(**state, activations=_stage_activations(model, layout, batch, stage))


def _stage_activations(model: Transformer, layout: Layout, batch: int, stage: int) -> float:
    pp, layers = layout.pp, layout.stages(model)[stage]
    tokens = layout.micro_batch * model.sequence
    in_flight = float(min(pp - stage, layout.micro_batches(batch)))
    if layout.chunks > 1:
        in_flight += (pp - 1) / layout.chunks
    total = layers * in_flight * layer_activations(model, layout)
    if layout.recompute == "full":  # one layer at a time is computed again, and kept until its backward pass is over
        total += _kept(model, layout)
    if stage == 0:
        total += in_flight * tokens * model.hidden / _along_sequence(layout)
    if stage == pp - 1:  # the input of the last norm and of the output layer; logits in float16 and float32
        total += tokens * (4.0 * model.hidden / _along_sequence(layout) + 6.0 * model.vocabulary / layout.tp)
    return total


def _along_sequence(layout: Layout) -> int:
    return layout.tp if layout.sequence_parallel else 1


def _kept(model: Transformer, layout: Layout) -> float:
    """Bytes of a layer's activations without full recomputation."""
    undivided = (8.0 if model.gated else 10.0) * model.hidden / _along_sequence(layout)
    divided = 4.0 * (model.hidden + model.kv_width) + (6.0 if model.gated else 4.0) * model.width
    if layout.recompute != "selective" and not model.fused_attention:
        divided += 5.0 * model.heads * model.sequence
    return layout.micro_batch * model.sequence * (undivided + divided / layout.tp)
