"""Train a transformer that is cut over ranks: replicas, layers' widths and stages; see the README here."""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn

import hvdkit.torch as hvd  # hvd
from hvdkit import parallel  # hvd

CONTEXT, WIDTH, HEAD, LAYERS = 64, 64, 16, 4

PLAN = {  # hvd: which layers are cut over tp ranks, and how
    "0.letters": "vocabulary",
    "*.query": "column",
    "*.key": "column",
    "*.value": "column",
    "*.out": "row",
    "*.up": "column",
    "*.down": "row",
}


class Embedding(nn.Module):
    """Vectors for letters and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.1)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """(batch, CONTEXT) to (batch, CONTEXT, WIDTH)."""
        vectors: torch.Tensor = self.letters(codes)
        return vectors + self.places


class Layer(nn.Module):
    """A layer whose number of heads follows from the width that this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.in_norm, self.up_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, CONTEXT, WIDTH), in and out."""
        seen = self.in_norm(x)
        q, k, v = (one(seen).unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        wide: torch.Tensor = self.down(nn.functional.gelu(self.up(self.up_norm(x))))
        return x + wide


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss in nats a letter."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def main(args: argparse.Namespace) -> None:
    """Train."""
    torch.set_num_threads(1)
    mesh = parallel.Mesh(tp=args.tp, pp=args.pp)  # hvd: the other ranks are replicas
    torch.manual_seed(0)  # the same weights on all ranks
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())  # part of Python's manual
    codes = torch.tensor(list(text.encode("ascii", "replace")))
    windows = codes[: args.steps * args.batch_size * (CONTEXT + 1)].view(args.steps, args.batch_size, CONTEXT + 1)
    whole = nn.Sequential(Embedding(), *(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128))

    own = args.batch_size // mesh.dp  # windows of this replica
    example = windows[0, : own // args.microbatches, :-1]
    model = parallel.pipeline(whole, loss=loss_of, example=example, microbatches=args.microbatches)  # hvd
    parallel.tensor_parallel(model, PLAN)  # hvd
    parallel.recompute(model)  # hvd: less memory for activations
    parallel.shard(model)  # hvd: parameters, gradients and optimizer state over the replicas
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step, batch in enumerate(windows):
        optimizer.zero_grad()
        mine = batch[own * mesh.coordinates["dp"] :][:own]  # hvd
        loss = hvd.allreduce(model.step(mine[:, :-1], mine[:, 1:]))  # hvd: forward and backward
        parallel.clip_grad_norm_(model.parameters(), 1.0)  # hvd
        optimizer.step()
        if hvd.rank() == 0 and (step + 1) % 10 == 0:  # hvd
            print(f"step {step + 1}  loss {loss:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="ranks over which each layer is cut")
    parser.add_argument("--pp", type=int, default=1, help="stages")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=32, help="windows in a batch of all replicas")
    parser.add_argument("--microbatches", type=int, default=4, help="parts of a batch, for the stages")
    parser.add_argument("--lr", type=float, default=0.004, help="learning rate")
    main(parser.parse_args())
