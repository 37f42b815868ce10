"""Train a small network on handwritten digits."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split


def read_digits() -> list[Subset[tuple[torch.Tensor, ...]]]:
    """Split 1797 images of 8 x 8 pixels into 1437 to train on and 360 to test with, always the same."""
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16).float().view(-1, 1, 8, 8), torch.tensor(labels))
    return random_split(digits, [1437, 360], generator=torch.Generator().manual_seed(0))


def make_model() -> nn.Module:
    """Two convolutions and two linear layers, about 150,000 parameters."""
    convolutions = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
    linear = nn.Linear(1024, 128), nn.ReLU(), nn.Dropout(0.4), nn.Linear(128, 10)
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Dropout(0.4), nn.Flatten(), *linear)


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    torch.manual_seed(args.seed)
    train, test = read_digits()
    batches = DataLoader(train, args.batch_size, shuffle=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(1, args.epochs + 1):
        total = 0.0
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}  loss {total / len(batches):.4f}")
        if args.checkpoint:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint)

    model.eval()
    right = 0
    for images, labels in DataLoader(test, 256):
        right += int((model(images).argmax(dim=1) == labels).sum())
    print(f"test accuracy {right / len(test):.2%} of {len(test)} images")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=64, help="samples in a batch")
    parser.add_argument("--lr", type=float, default=0.04, help="learning rate")
    parser.add_argument("--checkpoint", default="", help="file that is written after each epoch; none if left out")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
