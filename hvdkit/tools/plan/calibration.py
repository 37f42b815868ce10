"""What data sheets do not say: how much of a GPU's figures a training step reaches. Fitted once, kept as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Few physical constants, the same for all models and layouts.

    The values are what `python -m benchmarks.plan_fit` prints: fitted to one half of the model sizes of the times of
    one node that vTrain has published, except `network_efficiency`, which one node cannot show.

    product_efficiency: of the peak, for large matrix products.
    tail_waves: rounds of tiles, on all processors, that a product loses at its begin and end.
    memory_efficiency: of the bandwidth, for operations on elements.
    kernel_s: seconds of a GPU between two kernels.
    launch_s: CPU seconds to launch a kernel; a layer takes no less than its kernels' sum.
    collective_launch_s: CPU seconds of a collective beyond that.
    collective_s: seconds of a collective that do not depend on its size, for each doubling of the ranks.
    link_efficiency, network_efficiency: of the links' bandwidth.
    logit_bytes: traffic of cross-entropy, for each logit.
    whole_head: how many times as long output layer and loss take where tp is 1.
    update_bytes: traffic of the optimizer, for each parameter.
    layer_scale: what a layer was measured to take, over what these constants say.
    """

    product_efficiency: float = 0.797
    tail_waves: float = 0.423
    memory_efficiency: float = 0.785
    kernel_s: float = 4.46e-6
    launch_s: float = 51.5e-6
    collective_launch_s: float = 129e-6
    collective_s: float = 197e-6
    link_efficiency: float = 0.782
    network_efficiency: float = 0.8
    logit_bytes: float = 32.3
    whole_head: float = 3.10
    update_bytes: float = 30.2
    layer_scale: float = 1.0
