"""Train in 16 bits with gradients that are added up over several small batches and clipped."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split


def read_digits() -> list[Subset[tuple[torch.Tensor, ...]]]:
    """Split 1797 images of 8 x 8 pixels into 1437 to train on and 360 to test with, always the same."""
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    return random_split(digits, [1437, 360], generator=torch.Generator().manual_seed(0))


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    train, test = read_digits()
    batches = DataLoader(train, args.batch_size, shuffle=True)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # float16 wants its loss scaled; CPUs have bfloat16, which does not.
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)

    for epoch in range(args.epochs):
        total = 0.0
        for number, (images, labels) in enumerate(batches, 1):
            with torch.autocast(device.type, half):
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            scaler.scale(loss / args.accumulate).backward()
            total += loss.item()
            if number % args.accumulate == 0 or number == len(batches):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        print(f"epoch {epoch + 1}  loss {total / len(batches):.4f}")

    model.eval()
    right = 0
    for images, labels in DataLoader(test, 256):
        right += int((model(images.to(device)).argmax(dim=1).cpu() == labels).sum())
    print(f"test accuracy {right / len(test):.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a batch")
    parser.add_argument("--accumulate", type=int, default=2, help="batches of a step")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="longest gradient")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
