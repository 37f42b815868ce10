"""A small transformer for the tests of hvdkit.parallel, and a text that comes with Python."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import nn

CONTEXT, WIDTH, HEAD, LAYERS, LETTERS = 16, 32, 8, 2, 128
PLAN = {
    "embedding.letters": "vocabulary",
    "layers.*.query": "column",
    "layers.*.key": "column",
    "layers.*.value": "column",
    "layers.*.out": "row",
    "layers.*.up": "column",
    "layers.*.down": "row",
    "head.scores": "vocabulary",
}
SEQUENCE = {
    **PLAN,
    "embedding.places": "vocabulary",
    "layers.*.*_norm": "sequence",
    "head.norm": "sequence",
    "head.scores": "loss",
}


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        places: torch.Tensor = self.places(torch.arange(codes.shape[1]).unsqueeze(0))
        letters: torch.Tensor = self.letters(codes)
        return places + letters


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_norm, self.up_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.in_norm(x)
        query, key, value = (
            one(seen).unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        down: torch.Tensor = self.down(nn.functional.gelu(self.up(self.up_norm(x))))
        return x + down


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scores(self.norm(x))
        return scores


class LanguageModel(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding, self.head = Embedding(), Head()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.embedding(codes)
        for layer in self.layers:
            x = layer(x)
        scores: torch.Tensor = self.head(x)
        return scores


PARTS = ["embedding", "layers.*", "head"]


def make_model(layers: int = LAYERS) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(layers)


def read_batches(count: int, size: int) -> list[torch.Tensor]:
    """Batches (size, CONTEXT + 1) of letters of the language reference that comes with Python."""
    text = " ".join(topics[name] for name in sorted(topics))
    length = size * (CONTEXT + 1)
    codes = torch.tensor(list(text[: count * length].encode("ascii", "replace")))
    return list(codes.view(count, size, CONTEXT + 1))


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def make_optimizer(parameters: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=3e-3)  # type: ignore[arg-type]


def train_alone(steps: int, batch: int, clip: float = 0.0) -> list[float]:
    """The losses of one process that has the whole batch."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    losses = []
    for windows in read_batches(steps, batch):
        optimizer.zero_grad()
        loss = loss_of(model(windows[:, :-1]), windows[:, 1:])
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses
