"""The inputs of planning, as data: sizes of a transformer, GPUs and their links, and the layout of ranks.

Figures of GPUs are those of the makers' data sheets, dense, without sparsity. The fractions of them that a training
step reaches are fitted once, and stored as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit_planner.errors import PlanError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One accelerator, as a rank sees it.

    name: its name.
    memory: bytes.
    flops: float16 or bfloat16 multiply-adds of matrices, counted as two, a second.
    bandwidth: bytes a second from its memory.
    processors: number of processors, which compute tiles of a product at the same time.
    link: bytes a second, one direction, to the other GPUs of its node.
    network: bytes a second, one direction, of its share of the node's network.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    processors: int
    link: float
    network: float


#: V100: DGX-1V's successor with NVSwitch and 8 x 100 Gb/s; A100: DGX A100, 8 x 200 Gb/s; H100: DGX H100, 8 x 400 Gb/s;
#: MI250: one of its two dies, which is the GPU of a rank, with its share of Infinity Fabric and 4 x 200 Gb/s for 8
#: dies.
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
class Parts:
    """A sum whose terms are the fields."""

    @property
    def total(self) -> float:
        """The sum."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Map each term's name to its size."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Cluster:
    """A number `gpus` of equal GPUs, `node` of them in each node; the last node may have fewer."""

    gpu: Gpu
    gpus: int
    node: int = 8

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.node < 1:
            raise PlanError(f"a cluster of {self.gpus} GPUs, {self.node} a node: give numbers from 1 up.")


def find_gpu(name: str) -> Gpu:
    """Find a preset by name, in any case. Raises PlanError with the known names."""
    key = name.strip().lower()
    try:
        return PRESETS[_SHORT.get(key, key)]
    except KeyError:
        raise PlanError(f"there is no GPU {name!r}. Give one of {', '.join(PRESETS)}, or measure one.") from None


@dataclass(frozen=True)
class Calibration:
    """Physical constants, the same for all models and layouts.

    The values are the output of `python -m benchmarks.plan_fit`: fitted to one half of the model sizes in vTrain's
    published times of one node, except `network_efficiency`, which one node cannot show.

    product_efficiency: fraction of the peak, for large matrix products.
    tail_waves: rounds of tiles, on all processors, that a product loses at its start and end.
    memory_efficiency: fraction of the bandwidth, for operations on elements.
    kernel_s: seconds of a GPU between two kernels.
    launch_s: CPU seconds to launch a kernel; a layer takes no less than its kernels' sum.
    collective_launch_s: CPU seconds of a collective beyond that, for each of its ranks.
    collective_s: seconds of a collective that do not depend on its size, for each doubling of the ranks.
    link_efficiency, network_efficiency: fraction of the links' bandwidth.
    logit_bytes: traffic of cross-entropy, for each logit.
    whole_head: factor by which output layer and loss take longer if tp is 1.
    update_bytes: traffic of the optimizer, for each parameter.
    layer_scale: measured time of a layer over the time by these constants.
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


#: The vocabulary of GPT-2, padded as by Megatron-LM. Tables of measurements seldom contain a vocabulary.
GPT_VOCABULARY = 51200


@dataclass(frozen=True)
class Transformer:
    """The sizes of a decoder-only transformer.

    hidden: width h.
    layers: number of layers.
    heads: number of attention heads.
    sequence: tokens s of a sample.
    vocabulary: number of words.
    feedforward: width of the MLP, 0 for 4 h.
    kv_heads: heads of keys and values in grouped-query attention, 0 for `heads`.
    gated: an MLP of three matrices (SwiGLU), without biases.
    tied: the output layer shares the embedding's weight.
    positions: learned position embeddings.
    fused_attention: no s x s matrix in memory (FlashAttention).

    Raises PlanError for impossible sizes.
    """

    hidden: int
    layers: int
    heads: int
    sequence: int
    vocabulary: int = GPT_VOCABULARY
    feedforward: int = 0
    kv_heads: int = 0
    gated: bool = False
    tied: bool = True
    positions: bool = True
    fused_attention: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise PlanError(f"the model's {name} is {getattr(self, name)}. Give a number from 1 up.")
        if self.feedforward < 0 or self.kv_heads < 0:
            raise PlanError(f"feedforward {self.feedforward} and kv_heads {self.kv_heads}: give numbers from 1 up.")
        if self.hidden % self.heads:
            raise PlanError(f"hidden {self.hidden} is no multiple of the {self.heads} heads. Correct one of them.")
        if self.heads % self.grouped_heads:
            raise PlanError(f"{self.heads} heads are no multiple of the {self.kv_heads} kv_heads. Correct one of them.")

    @property
    def width(self) -> int:
        """Width of the MLP."""
        return self.feedforward or 4 * self.hidden

    @property
    def grouped_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.hidden // self.heads * self.grouped_heads

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of a layer: 12 h^2 + 13 h for GPT (arXiv 2104.04473, equation 2)."""
        h, f = self.hidden, self.width
        matrices = 2 * h * h + 2 * h * self.kv_width + (3 if self.gated else 2) * h * f
        return matrices + (2 * h if self.gated else 6 * h + 2 * self.kv_width + f + h)

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the embeddings, of words, once, and of positions."""
        return (self.vocabulary + (self.sequence if self.positions else 0)) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Number of parameters of a separate output layer; 0 if it shares the embedding's."""
        return 0 if self.tied else self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        norm = (1 if self.gated else 2) * self.hidden
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters + norm

    @property
    def layer_flops(self) -> float:
        """Floating-point operations of the forward pass of a layer for one sample; the backward pass has twice as many.

        24 s h^2 (1 + s / (6 h)) for GPT (arXiv 2104.04473, appendix).
        """
        h, s = self.hidden, self.sequence
        matrices = 2 * h * h + 2 * h * self.kv_width + (3 if self.gated else 2) * h * self.width
        return 2.0 * s * matrices + 4.0 * s * s * h

    @property
    def head_flops(self) -> float:
        """Floating-point operations of the forward pass of the output layer for one sample."""
        return 2.0 * self.sequence * self.hidden * self.vocabulary

    def step_flops(self, batch: int) -> float:
        """Count the operations that the model needs for a step on `batch` samples, without recomputation."""
        return 3.0 * batch * (self.layers * self.layer_flops + self.head_flops)


RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Layout:
    """A layout of dp x tp x pp ranks.

    dp: number of replicas (data parallelism).
    tp: ranks of tensor parallelism.
    pp: stages of the pipeline.
    micro_batch: samples that pass a pipeline at once on one replica.
    chunks: number of model chunks on a rank of the pipeline; 1 is 1F1B, more is interleaved 1F1B.
    zero: stage of ZeRO.
    recompute: none, selective (the attention's s x s matrices) or full (all of a layer).
    sequence_parallel: activations that tensor parallelism does not divide are divided along the sequence.
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
        """Number of ranks of the whole layout."""
        return self.dp * self.tp * self.pp

    @property
    def schedule(self) -> str:
        """The pipeline's schedule in words."""
        if self.pp == 1:
            return "-"
        return "1F1B" if self.chunks == 1 else f"interleaved {self.chunks}"

    def micro_batches(self, batch: int) -> int:
        """Count the micro-batches of a step on each replica, for `batch` samples in total."""
        return batch // (self.dp * self.micro_batch)

    def stages(self, model: Transformer) -> list[int]:
        """Return the number of layers of each stage; the first stages have one more if they cannot be equal."""
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
