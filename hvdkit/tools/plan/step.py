"""Seconds of a training step by part: compute, tensor parallelism, pipeline, gradients, update.

The pipeline follows arXiv 2104.04473, section 2.2: a step takes all micro-batches on its slowest stage, and once the
others; interleaving divides the second by the chunks, and multiplies what stages send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdkit.tools.plan.calibration import Calibration
from hvdkit.tools.plan.cluster import Cluster
from hvdkit.tools.plan.compute import head_time, layer_time
from hvdkit.tools.plan.layout import Layout
from hvdkit.tools.plan.links import data_bandwidth, ring_s, stage_bandwidth, tensor_bandwidth
from hvdkit.tools.plan.memory import WEIGHT_BYTES, stage_parameters
from hvdkit.tools.plan.model import Transformer


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest stage.

    compute: of its micro-batches. tensor: its collectives of tensor parallelism. bubble: waiting for other stages.
    transfers: sending between stages. gradients: exposed communication of data parallelism. update: the optimizer.
    """

    compute: float
    tensor: float
    bubble: float
    transfers: float
    gradients: float
    update: float

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(self.parts().values())

    def parts(self) -> Mapping[str, float]:
        """Part to seconds."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def compute_step(model: Transformer, layout: Layout, cluster: Cluster, batch: int, constants: Calibration) -> StepTime:
    """Compute the time of a step. The layout has been checked (`check_layout`)."""
    layer, tensor = _layer(model, layout, cluster, constants)
    head = head_time(model, layout, cluster.gpu, constants)
    layers = layout.stages(model)
    stages = [count * (layer + tensor) for count in layers]
    stages[-1] += head
    slowest = max(range(layout.pp), key=stages.__getitem__)
    micro_batches = layout.micro_batches(batch)
    bubble = (sum(stages) - stages[slowest]) / layout.chunks
    parameters = max(stage_parameters(model, layout, 0), stage_parameters(model, layout, layout.pp - 1))
    gradients = _gradients(model, layout, cluster, constants, parameters)
    owned = parameters / (layout.dp if layout.zero else 1)
    rate = cluster.gpu.bandwidth * constants.memory_efficiency
    return StepTime(
        compute=micro_batches * (stages[slowest] - layers[slowest] * tensor),
        tensor=micro_batches * layers[slowest] * tensor,
        bubble=bubble,
        transfers=_transfers(model, layout, cluster, constants, micro_batches),
        gradients=gradients,
        update=constants.update_bytes * owned / rate,
    )


def _layer(model: Transformer, layout: Layout, cluster: Cluster, constants: Calibration) -> tuple[float, float]:
    """Seconds of a layer for a micro-batch, forward and backward: of compute and of collectives of its tp ranks."""
    time = layer_time(model, layout, cluster.gpu, constants)
    # Forward 2 allreduces, backward 2, recomputing 2 more; with sequence parallelism each is a pair of half the bytes.
    collectives = 0 if layout.tp == 1 else 6 if layout.recompute == "full" else 4
    nbytes = 2.0 * layout.micro_batch * model.sequence * model.hidden
    each = ring_s(nbytes, layout.tp, tensor_bandwidth(cluster, layout, constants), constants)
    tensor = collectives * each
    compute = time.forward + time.backward
    floor = time.kernels * constants.launch_s + collectives * constants.collective_launch_s
    return max(compute, floor - tensor), tensor


def _transfers(
    model: Transformer, layout: Layout, cluster: Cluster, constants: Calibration, micro_batches: int
) -> float:
    """Seconds of sending activations and their gradients: a rank sends its part, then the receivers gather the rest."""
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
    """Seconds of reducing gradients and gathering weights. Nothing is hidden: Megatron-LM starts it at the end."""
    bandwidth = data_bandwidth(cluster, layout, constants)
    time = ring_s(WEIGHT_BYTES * parameters, layout.dp, bandwidth, constants)
    if layout.zero == 3:  # weights are gathered for the forward and for the backward pass
        time *= 1.5
    return time
