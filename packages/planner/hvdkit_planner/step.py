"""Memory of a rank, and seconds of a training step, by part.

Parameters and optimizer: arXiv 1910.02054 (ZeRO), with gradients in float32 as in Megatron-LM. Activations:
arXiv 2205.05198, equations 1 to 6.

The pipeline follows arXiv 2104.04473, section 2.2: a step takes the time of all micro-batches on its slowest stage, and
the time of one micro-batch on the other stages; interleaving divides the latter by the chunks, and multiplies the
traffic between stages.

Compute is a roofline: a layer's matrix products, its operations on elements, and its kernels. Communication is
alpha-beta formulas of rings (Thakur et al. 2005), over links in Megatron-LM's order: ranks are numbered so that
tensor parallelism is innermost, then data parallelism, then the pipeline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdkit_planner.layout import GIB, Calibration, Cluster, Gpu, Layout, Parts, Transformer

WEIGHT_BYTES = 2  # float16 or bfloat16
GRADIENT_BYTES = 4  # sums of micro-batches, in float32
OPTIMIZER_BYTES = 12  # Adam: master weight and two moments in float32
CONTEXT_BYTES = 2.0 * GIB  # the driver's context, NCCL's buffers, workspaces: an assumption, not a measurement


@dataclass(frozen=True)
class Memory(Parts):
    """Bytes of the rank with the highest need. context: use by the driver and libraries."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    context: float = CONTEXT_BYTES

    @property
    def state(self) -> float:
        """The sum of parameters, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer


def compute_memory(model: Transformer, layout: Layout, batch: int) -> Memory:
    """Compute the memory of the stage with the highest need.

    The first stage has the most activations, the last the output layer.
    """
    stages = {0, layout.pp - 1}  # a middle stage has no more layers, micro-batches or embeddings than the first
    return max((_stage_memory(model, layout, batch, stage) for stage in stages), key=lambda memory: memory.total)


def stage_parameters(model: Transformer, layout: Layout, stage: int) -> float:
    """Count the parameters of one rank of a stage.

    An embedding that the output layer shares is on both ends of a pipeline.
    """
    first, last = stage == 0, stage == layout.pp - 1
    total = float(layout.stages(model)[stage] * model.layer_parameters)
    total += model.embedding_parameters if first else 0
    if last:
        total += model.head_parameters if not model.tied else 0 if first else model.vocabulary * model.hidden
    return total / layout.tp


def layer_activations(model: Transformer, layout: Layout) -> float:
    """Compute the bytes that a layer keeps of one micro-batch for its backward pass.

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
    if layout.recompute == "full":  # one layer at a time is recomputed, and kept until the end of its backward pass
        total += _kept(model, layout)
    if stage == 0:
        total += in_flight * tokens * model.hidden / _along_sequence(layout)
    if stage == pp - 1:  # the input of the last norm and of the output layer; logits in float16 and float32
        total += tokens * (4.0 * model.hidden / _along_sequence(layout) + 6.0 * model.vocabulary / layout.tp)
    return total


def _along_sequence(layout: Layout) -> int:
    return layout.tp if layout.sequence_parallel else 1


def _kept(model: Transformer, layout: Layout) -> float:
    """Compute the bytes of a layer's activations without full recomputation."""
    undivided = (8.0 if model.gated else 10.0) * model.hidden / _along_sequence(layout)
    divided = 4.0 * (model.hidden + model.kv_width) + (6.0 if model.gated else 4.0) * model.width
    if layout.recompute != "selective" and not model.fused_attention:
        divided += 5.0 * model.heads * model.sequence
    return layout.micro_batch * model.sequence * (undivided + divided / layout.tp)


def tensor_bandwidth(cluster: Cluster, layout: Layout, constants: Calibration) -> float:
    """Compute the bytes a second of a ring of the tp ranks."""
    return _ring_bandwidth(cluster, constants, layout.tp, 1)


def data_bandwidth(cluster: Cluster, layout: Layout, constants: Calibration) -> float:
    """Compute the bytes a second of a ring of the dp ranks, while the other rings of the node use the network too."""
    return _ring_bandwidth(cluster, constants, layout.dp, layout.tp)


def stage_bandwidth(cluster: Cluster, layout: Layout, constants: Calibration) -> float:
    """Compute the bytes a second from a rank of a pipeline stage to the next stage, while all ranks send."""
    inside = 2 * layout.dp * layout.tp <= cluster.node or cluster.gpus <= cluster.node
    if inside:
        return cluster.gpu.link * constants.link_efficiency
    return cluster.gpu.network * constants.network_efficiency


def ring_s(nbytes: float, ranks: int, bandwidth: float, constants: Calibration, *, passes: int = 2) -> float:
    """Compute the seconds of an allreduce (2 passes), a reduce-scatter or an allgather (1 pass) in a ring.

    nbytes: bytes of the whole tensor.
    ranks: number of ranks.
    bandwidth: bytes a second of the ring.
    constants: the latency.
    passes: 2 for an allreduce, 1 for the others.
    """
    if ranks == 1:
        return 0.0
    latency = constants.collective_s * (1 + math.log2(ranks)) * passes / 2
    return latency + passes * (ranks - 1) / ranks * nbytes / bandwidth


def _ring_bandwidth(cluster: Cluster, constants: Calibration, ranks: int, stride: int) -> float:
    """Compute the bytes a second of a ring of ranks that are `stride` apart.

    In a node each ring has the network share of its members there.
    """
    inside = cluster.gpu.link * constants.link_efficiency
    if cluster.gpus <= cluster.node or ranks * stride <= cluster.node:
        return inside
    members = max(1, cluster.node // stride)
    return min(inside, cluster.gpu.network * constants.network_efficiency * members)


_TILE = (256, 128)  # the tile of a result for one processor, the size that cuBLAS uses for large products

# Number of kernels of a layer beside matrix products, forward and backward: norms, biases, dropouts, transposes,
# softmax.
_KERNELS = (14, 26)
_PRODUCTS = 6


@dataclass(frozen=True)
class LayerTime:
    """Seconds of the forward and backward pass of a layer for one micro-batch on a GPU, without communication."""

    forward: float
    backward: float
    kernels: int


def layer_time(model: Transformer, layout: Layout, gpu: Gpu, constants: Calibration) -> LayerTime:
    """Compute the time of a layer; the backward pass contains the recomputation.

    model: the transformer.
    layout: the layout.
    gpu: the GPU.
    constants: the physical constants.
    """
    attention, forward = _forward_products(model, layout, gpu, constants)
    backward = 2 * forward
    elements, scores = _element_bytes(model, layout)
    rate = gpu.bandwidth * constants.memory_efficiency
    forward += (elements[0] + scores[0]) / rate + constants.kernel_s * (_KERNELS[0] + _PRODUCTS)
    backward += (elements[1] + scores[1]) / rate + constants.kernel_s * (_KERNELS[1] + 2 * _PRODUCTS)
    kernels = sum(_KERNELS) + 3 * _PRODUCTS
    if layout.recompute == "full":
        backward += forward
        kernels += _KERNELS[0] + _PRODUCTS
    elif layout.recompute == "selective" and not model.fused_attention:
        backward += attention + scores[0] / rate + 4 * constants.kernel_s
        kernels += 4
    return LayerTime(forward * constants.layer_scale, backward * constants.layer_scale, kernels)


def head_time(model: Transformer, layout: Layout, gpu: Gpu, constants: Calibration) -> float:
    """Compute the seconds of the output layer and the loss, forward and backward, for one micro-batch.

    model: the transformer.
    layout: the layout.
    gpu: the GPU.
    constants: the physical constants.
    """
    tokens, vocabulary = layout.micro_batch * model.sequence, model.vocabulary // layout.tp
    products = 3 * product_s(tokens, vocabulary, model.hidden, gpu, constants)
    traffic = constants.logit_bytes * tokens * vocabulary / (gpu.bandwidth * constants.memory_efficiency)
    time = products + traffic
    return time * (constants.whole_head if layout.tp == 1 else 1.0)


def product_s(m: int, n: int, k: int, gpu: Gpu, constants: Calibration, count: int = 1) -> float:
    """Compute the seconds of `count` products of m x k by k x n at once.

    m, n, k: the sizes.
    gpu: the GPU.
    constants: the physical constants.
    count: number of products.
    It is the longer of two times: of the tiles, in rounds on all processors, and of its bytes.
    """
    tiles = count * math.ceil(m / _TILE[0]) * math.ceil(n / _TILE[1])
    tile_flops = 2.0 * _TILE[0] * _TILE[1] * k
    rounds = tiles + constants.tail_waves * gpu.processors
    arithmetic = rounds * tile_flops / (gpu.flops * constants.product_efficiency)
    traffic = 2.0 * count * (m * k + k * n + m * n) / (gpu.bandwidth * constants.memory_efficiency)
    return max(arithmetic, traffic)


def _forward_products(model: Transformer, layout: Layout, gpu: Gpu, constants: Calibration) -> tuple[float, float]:
    """Compute the seconds of the attention's two products, and of all products."""
    h, s, t = model.hidden, model.sequence, layout.tp
    tokens, heads, size = layout.micro_batch * s, layout.micro_batch * model.heads // t, h // model.heads
    attention = product_s(s, s, size, gpu, constants, heads) + product_s(s, size, s, gpu, constants, heads)
    shapes = [
        ((h + 2 * model.kv_width) // t, h),
        (h, h // t),
        ((2 if model.gated else 1) * model.width // t, h),
        (h, model.width // t),
    ]
    return attention, attention + sum(product_s(tokens, max(1, n), max(1, k), gpu, constants) for n, k in shapes)


def _element_bytes(model: Transformer, layout: Layout) -> tuple[tuple[float, float], tuple[float, float]]:
    """Compute the bytes that operations on elements read and write: outside the s x s scores, and on them.

    Each is a pair: forward, backward.
    Undivided by tp: two norms (4 forward, 8 backward) and two times bias, dropout and residual (7 and 9). Divided:
    transposes of queries, keys, values and context, and the activation. Scores: softmax (4 and 6), dropout (5 and 5).
    """
    tokens, t = layout.micro_batch * model.sequence, layout.tp
    along = t if layout.sequence_parallel else 1
    inner = model.hidden + model.kv_width
    wide = model.width * (1.5 if model.gated else 1)
    forward = 22.0 * model.hidden / along + (8.0 * inner + 4.0 * wide) / t
    backward = 34.0 * model.hidden / along + (10.0 * inner + 6.0 * wide) / t
    scores = 0.0 if model.fused_attention else tokens * model.sequence * model.heads / t
    return (tokens * forward, tokens * backward), (9.0 * scores, 11.0 * scores)


@dataclass(frozen=True)
class StepTime(Parts):
    """Seconds of a step on the slowest stage.

    compute: compute of its micro-batches.
    tensor: its collectives of tensor parallelism.
    bubble: waiting for other stages.
    transfers: sending between stages.
    gradients: exposed communication of data parallelism.
    update: the optimizer.
    """

    compute: float
    tensor: float
    bubble: float
    transfers: float
    gradients: float
    update: float


def compute_step(model: Transformer, layout: Layout, cluster: Cluster, batch: int, constants: Calibration) -> StepTime:
    """Compute the time of a step.

    model: the transformer.
    layout: the layout, which `check_layout` has checked.
    cluster: the GPUs.
    batch: samples of the step.
    constants: the physical constants.
    """
    layer, layer_tensor = _layer(model, layout, cluster, constants)
    computes = [count * layer for count in layout.stages(model)]
    computes[-1] += head_time(model, layout, cluster.gpu, constants)
    tensors = [count * layer_tensor for count in layout.stages(model)]
    # Allreduces of the embedding, of the output layer's input gradient, and of the loss: three of one number per token.
    exchange, short = (_allreduce(model, layout, cluster, constants, width) for width in (model.hidden, 0))
    tensors[0] += exchange
    tensors[-1] += exchange + 3 * short
    stages = [compute + tensor for compute, tensor in zip(computes, tensors, strict=True)]
    slowest = max(range(layout.pp), key=stages.__getitem__)
    micro_batches = layout.micro_batches(batch)
    bubble = (sum(stages) - stages[slowest]) / layout.chunks
    parameters = max(stage_parameters(model, layout, 0), stage_parameters(model, layout, layout.pp - 1))
    gradients = _gradients(model, layout, cluster, constants, parameters)
    owned = parameters / (layout.dp if layout.zero else 1)
    rate = cluster.gpu.bandwidth * constants.memory_efficiency
    return StepTime(
        compute=micro_batches * computes[slowest],
        tensor=micro_batches * tensors[slowest],
        bubble=bubble,
        transfers=_transfers(model, layout, cluster, constants, micro_batches),
        gradients=gradients,
        update=constants.update_bytes * owned / rate,
    )


def _layer(model: Transformer, layout: Layout, cluster: Cluster, constants: Calibration) -> tuple[float, float]:
    """Compute the seconds of a layer for a micro-batch, forward and backward: compute, and collectives of tp."""
    time = layer_time(model, layout, cluster.gpu, constants)
    # Forward 2 allreduces, backward 2, recomputation 2 more; with sequence parallelism each is a pair of half the
    # bytes.
    collectives = 0 if layout.tp == 1 else 6 if layout.recompute == "full" else 4
    tensor = collectives * _allreduce(model, layout, cluster, constants, model.hidden)
    compute = time.forward + time.backward
    # A collective begins after its last rank has launched it: the more ranks, the later.
    floor = time.kernels * constants.launch_s + collectives * layout.tp * constants.collective_launch_s
    return max(compute, floor - tensor), tensor


def _allreduce(model: Transformer, layout: Layout, cluster: Cluster, constants: Calibration, width: int) -> float:
    """Compute the seconds of an allreduce of `width` values for each token of a micro-batch on the tp ranks."""
    nbytes = 2.0 * layout.micro_batch * model.sequence * width
    return ring_s(nbytes, layout.tp, tensor_bandwidth(cluster, layout, constants), constants)


def _transfers(
    model: Transformer, layout: Layout, cluster: Cluster, constants: Calibration, micro_batches: int
) -> float:
    """Compute the seconds of sending activations and their gradients.

    A rank sends its shard, then the receivers gather the rest.
    """
    if layout.pp == 1:
        return 0.0
    nbytes = 2.0 * layout.micro_batch * model.sequence * model.hidden
    each = constants.collective_s + nbytes / layout.tp / stage_bandwidth(cluster, layout, constants)
    if not layout.sequence_parallel:
        each += ring_s(nbytes, layout.tp, tensor_bandwidth(cluster, layout, constants), constants, passes=1)
    return 2.0 * each * (micro_batches * layout.chunks + layout.pp - 1)


def _gradients(
    model: Transformer, layout: Layout, cluster: Cluster, constants: Calibration, parameters: float
) -> float:
    """Compute the seconds of reducing gradients and gathering weights.

    Nothing is hidden: Megatron-LM starts this communication at the end.
    """
    bandwidth = data_bandwidth(cluster, layout, constants)
    time = ring_s(WEIGHT_BYTES * parameters, layout.dp, bandwidth, constants)
    if layout.zero == 3:  # weights are gathered for the forward and for the backward pass
        time *= 1.5
    return time
