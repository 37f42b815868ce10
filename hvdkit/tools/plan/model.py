"""A transformer as its sizes: parameters and arithmetic, pure functions of them."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.errors import PlanError

#: The vocabulary of GPT-2, padded as Megatron-LM pads it. Tables of measurements seldom give one.
GPT_VOCABULARY = 51200


@dataclass(frozen=True)
class Transformer:
    """The sizes of a decoder-only transformer.

    hidden: width h. sequence: tokens s of a sample. feedforward: width of the MLP, 0 for 4 h. kv_heads: of
    grouped-query attention, 0 for `heads`. gated: an MLP of three matrices (SwiGLU), without biases. tied: the output
    layer shares the embedding's weight. positions: learned position embeddings. fused_attention: no s x s matrix in
    memory (FlashAttention).

    Raises PlanError for sizes that no transformer has.
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
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.hidden // self.heads * self.grouped_heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: 12 h^2 + 13 h for GPT (arXiv 2104.04473, equation 2)."""
        h, f = self.hidden, self.width
        matrices = 2 * h * h + 2 * h * self.kv_width + (3 if self.gated else 2) * h * f
        return matrices + (2 * h if self.gated else 6 * h + 2 * self.kv_width + f + h)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding of words, once, and of positions."""
        return (self.vocabulary + (self.sequence if self.positions else 0)) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of an output layer of its own; 0 if it shares the embedding's."""
        return 0 if self.tied else self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
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
        """The same of the output layer."""
        return 2.0 * self.sequence * self.hidden * self.vocabulary

    def step_flops(self, batch: int) -> float:
        """Operations of a step on `batch` samples that the model needs, without recomputation."""
        return 3.0 * batch * (self.layers * self.layer_flops + self.head_flops)
