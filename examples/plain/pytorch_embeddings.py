"""Tell chapters of Python's manual apart by their words, with sparse gradients of the table of words."""

import argparse
import re
from pydoc_data.topics import topics
from zlib import crc32

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

ROWS = 50_000  # of the table; a batch uses a few hundred
CHAPTERS = 8
WINDOW = 24  # words of a sample


def read_windows() -> TensorDataset:
    """Cut the longest chapters of the manual that comes with Python into windows of words: (n, 24), (n,)."""
    chosen = sorted(topics.values(), key=len)[-CHAPTERS:]
    windows, labels = [], []
    for label, text in enumerate(chosen):
        words = [crc32(word.encode()) % ROWS for word in re.findall(r"[a-z_]+", text.lower())]
        cut = range(0, len(words) - WINDOW + 1, WINDOW)
        windows += [words[at : at + WINDOW] for at in cut]
        labels += [label for _ in cut]
    return TensorDataset(torch.tensor(windows), torch.tensor(labels))


class Chapters(nn.Module):
    """The mean of the words' rows, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(ROWS, 32, sparse=True)
        self.chapters = nn.Linear(32, CHAPTERS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of the chapters, (n, 8), of windows of words, (n, 24)."""
        scores: torch.Tensor = self.chapters(self.words(words))
        return scores


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    torch.manual_seed(args.seed)
    train, test = random_split(read_windows(), [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    batches = DataLoader(train, args.batch_size, shuffle=True)
    model = Chapters()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        total = 0.0
        for words, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(words), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}  loss {total / len(batches):.4f}")

    model.eval()
    right = 0
    for words, labels in DataLoader(test, 256):
        right += int((model(words).argmax(dim=1) == labels).sum())
    print(f"test accuracy {right / len(test):.2%} of {len(test)} windows in {CHAPTERS} chapters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, help="passes over the text")
    parser.add_argument("--batch-size", type=int, default=64, help="windows in a batch")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
