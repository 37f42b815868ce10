"""Seconds of a layer on one rank: its matrix products, its operations on elements, and its kernels, by a roofline."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdkit.tools.plan.calibration import Calibration
from hvdkit.tools.plan.cluster import Gpu
from hvdkit.tools.plan.layout import Layout
from hvdkit.tools.plan.model import Transformer

_TILE = (256, 128)  # the tile of a result that one processor computes, as cuBLAS chooses it for large products

# Kernels of a layer beside matrix products, forward and backward: norms, biases, dropouts, transposes, softmax.
_KERNELS = (14, 26)
_PRODUCTS = 6


@dataclass(frozen=True)
class LayerTime:
    """Seconds of the forward and backward pass of a layer for one micro-batch on a GPU, without communication."""

    forward: float
    backward: float
    kernels: int


def layer_time(model: Transformer, layout: Layout, gpu: Gpu, constants: Calibration) -> LayerTime:
    """Compute the time of a layer; the backward pass contains what it computes again."""
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
    """Seconds of the output layer and the loss, forward and backward, for one micro-batch."""
    tokens, vocabulary = layout.micro_batch * model.sequence, model.vocabulary // layout.tp
    products = 3 * product_s(tokens, vocabulary, model.hidden, gpu, constants)
    traffic = constants.logit_bytes * tokens * vocabulary / (gpu.bandwidth * constants.memory_efficiency)
    time = products + traffic
    return time * (constants.whole_head if layout.tp == 1 else 1.0)


def product_s(m: int, n: int, k: int, gpu: Gpu, constants: Calibration, count: int = 1) -> float:
    """Seconds of `count` products of m x k by k x n at once: tiles in rounds on all processors, or its bytes."""
    tiles = count * math.ceil(m / _TILE[0]) * math.ceil(n / _TILE[1])
    tile_flops = 2.0 * _TILE[0] * _TILE[1] * k
    rounds = tiles + constants.tail_waves * gpu.processors
    arithmetic = rounds * tile_flops / (gpu.flops * constants.product_efficiency)
    traffic = 2.0 * count * (m * k + k * n + m * n) / (gpu.bandwidth * constants.memory_efficiency)
    return max(arithmetic, traffic)


def _forward_products(model: Transformer, layout: Layout, gpu: Gpu, constants: Calibration) -> tuple[float, float]:
    """Seconds of the attention's two products, and of all products."""
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
    """Bytes that operations on elements read and write: outside the s x s scores, and on them; forward, backward.

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
