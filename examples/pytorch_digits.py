"""Train a small network on handwritten digits; the lines marked `# hvd` are what `hvdrun -np 2 python FILE` needs."""

import argparse
import os
import sys
import time

import torch
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import hvdkit.torch as hvd  # hvd


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


def save(state: dict[str, object], path: str) -> None:
    """Write a checkpoint so that `path` is whole, the old one or the new one, whenever the machine stops."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def main(args: argparse.Namespace) -> int:
    """Train, test, and return the exit code."""
    hvd.init()  # hvd
    torch.set_num_threads(1)  # hvd: the ranks of a host share its cores, and the network is small
    torch.manual_seed(args.seed + hvd.rank())  # hvd: ranks drop out different neurons
    train, test = read_digits()
    sampler = hvd.data.ShardedSampler(train, seed=args.seed)  # hvd
    batches = DataLoader(train, args.batch_size, sampler=sampler)
    test_batches = DataLoader(test, 256, sampler=hvd.data.ShardedSampler(test, evaluation=True))  # hvd

    model = make_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    factor = hvd.learning_rate.linear_scale(args.batch_size * hvd.size(), reference=32)  # hvd
    hvd.learning_rate.scale_learning_rate(optimizer, factor)  # hvd
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # hvd
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # hvd
    steps = len(batches)
    warmup = hvd.learning_rate.WarmupSchedule(optimizer, factor=factor, warmup_epochs=3, steps_per_epoch=steps)  # hvd
    console = Console(quiet=hvd.rank() != 0, highlight=False, soft_wrap=True)  # hvd
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("epoch 1", total=args.epochs * steps)
        for epoch in range(1, args.epochs + 1):
            sampler.set_epoch(epoch)  # hvd
            mean_loss, began = hvd.metrics.Mean("loss"), time.perf_counter()
            for images, labels in batches:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                warmup.step()
                mean_loss.update(loss, len(labels))
                progress.advance(bar)
            rate = len(sampler) * hvd.size() / (time.perf_counter() - began)
            shown = f"epoch {epoch}  loss {mean_loss.compute():.4f}  {rate:,.0f} samples/s"
            progress.update(bar, description=shown)
            console.print(shown)
            if args.checkpoint and hvd.rank() == 0:  # hvd
                save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint)

    model.eval()
    mean_accuracy = hvd.metrics.Mean("accuracy")
    for images, labels in test_batches:
        mean_accuracy.update((model(images).argmax(dim=1) == labels).double().mean(), len(labels))
    accuracy = mean_accuracy.compute()
    console.print(f"test accuracy {accuracy:.2%} of {len(test)} images")
    console.print(hvd.describe())  # hvd
    return int(accuracy < args.min_accuracy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a batch of one rank")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for a joined batch of 32")
    parser.add_argument("--checkpoint", default="", help="file that rank 0 writes after each epoch; none if left out")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this test accuracy")
    sys.exit(main(parser.parse_args()))
