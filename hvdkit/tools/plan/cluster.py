"""GPUs, the links between them, and how much of a GPU's figures a training step reaches.

Figures are those of the makers' data sheets, dense, without sparsity. The shares that are reached are fitted once, and
kept as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.errors import PlanError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One accelerator, as a rank sees it.

    memory: bytes. flops: float16 or bfloat16 multiply-adds of matrices, counted as two, a second. bandwidth: bytes a
    second from its memory. processors: that run tiles of a product at the same time. link: bytes a second, one
    direction, to the others of its node. network: bytes a second, one direction, of its share of the node's network.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    processors: int
    link: float
    network: float


#: V100: DGX-1V's successor with NVSwitch and 8 x 100 Gb/s; A100: DGX A100, 8 x 200 Gb/s; H100: DGX H100, 8 x 400 Gb/s;
#: MI250: one of its two dies, which is what a rank has, with its share of Infinity Fabric and 4 x 200 Gb/s for 8 dies.
PRESETS = {
    "v100-16": Gpu("V100-SXM2 16 GB", 16 * GIB, 125e12, 0.9e12, 80, 150e9, 12.5e9),
    "v100-32": Gpu("V100-SXM3 32 GB", 32 * GIB, 125e12, 0.9e12, 80, 150e9, 12.5e9),
    "a100-40": Gpu("A100-SXM4 40 GB", 40 * GIB, 312e12, 1.555e12, 108, 300e9, 25e9),
    "a100-80": Gpu("A100-SXM4 80 GB", 80 * GIB, 312e12, 2.039e12, 108, 300e9, 25e9),
    "h100-80": Gpu("H100-SXM5 80 GB", 80 * GIB, 989e12, 3.35e12, 132, 450e9, 50e9),
    "mi250": Gpu("MI250 (one die)", 64 * GIB, 181e12, 1.638e12, 104, 100e9, 12.5e9),
}
_SHORT = {"v100": "v100-32", "a100": "a100-80", "h100": "h100-80"}


@dataclass(frozen=True)
class Cluster:
    """`gpus` of one kind, `node` of them in each node; the last node may have fewer."""

    gpu: Gpu
    gpus: int
    node: int = 8

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.node < 1:
            raise PlanError(f"a cluster of {self.gpus} GPUs, {self.node} a node: give numbers from 1 up.")


def find_gpu(name: str) -> Gpu:
    """Find a preset by name, in any case. Raises PlanError with the names that there are."""
    key = name.strip().lower()
    try:
        return PRESETS[_SHORT.get(key, key)]
    except KeyError:
        raise PlanError(f"there is no GPU {name!r}. Give one of {', '.join(PRESETS)}, or measure one.") from None


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
    collective_launch_s: CPU seconds of a collective beyond that, for each of its ranks.
    collective_s: seconds of a collective that do not depend on its size, for each doubling of the ranks.
    link_efficiency, network_efficiency: of the links' bandwidth.
    logit_bytes: traffic of cross-entropy, for each logit.
    whole_head: how many times as long output layer and loss take where tp is 1.
    update_bytes: traffic of the optimizer, for each parameter.
    layer_scale: what a layer was measured to take, over what these constants say.
    """

    product_efficiency: float = 0.793
    tail_waves: float = 0.573
    memory_efficiency: float = 0.769
    kernel_s: float = 9.62e-6
    launch_s: float = 51.4e-6
    collective_launch_s: float = 32.4e-6
    collective_s: float = 111e-6
    link_efficiency: float = 0.724
    network_efficiency: float = 0.8
    logit_bytes: float = 47.7
    whole_head: float = 2.31
    update_bytes: float = 33.8
    layer_scale: float = 1.0
