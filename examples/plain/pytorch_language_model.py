"""Train a small transformer to write, letter by letter, like Python's manual."""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

CONTEXT = 64  # letters that the model sees
WIDTH = 64


def read_text() -> TensorDataset:
    """Cut part of the manual that comes with Python into windows of letters, as ASCII codes: (n, 65)."""
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())[:80_000]
    codes = torch.tensor(list(text.encode("ascii", "replace")))
    return TensorDataset(codes[: len(codes) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1))


class LanguageModel(nn.Module):
    """Two transformer layers, about 120,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """The mean loss, in nats a letter, of windows of 65 letters: each is to be told from those before it."""
        seen = self.letters(windows[:, :-1]) + self.places
        scores = self.scores(self.layers(seen, mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    torch.manual_seed(args.seed)
    train, test = random_split(read_text(), [0.9, 0.1], generator=torch.Generator().manual_seed(0))
    batches = DataLoader(train, args.batch_size, shuffle=True)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(batches))
    for epoch in range(args.epochs):
        total = 0.0
        for (windows,) in batches:
            optimizer.zero_grad()
            loss = model(windows)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            decay.step()
            total += loss.item()
        print(f"epoch {epoch + 1}  loss {total / len(batches):.4f}")

    with torch.no_grad():
        losses = [model(windows) * len(windows) for (windows,) in DataLoader(test, 64)]
    print(f"test loss {sum(losses) / len(test):.4f} nats a letter")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2, help="passes over the text")
    parser.add_argument("--batch-size", type=int, default=32, help="windows in a batch")
    parser.add_argument("--lr", type=float, default=0.004, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
