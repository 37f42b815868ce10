"""Train digits on ranks of unequal speed: `hvdrun -np 3 python FILE --slow-ms 2` makes the last rank slow."""

import argparse
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import hvdkit.torch as hvd  # hvd


def read_digits() -> list[Subset[tuple[torch.Tensor, ...]]]:
    """Split 1797 images of 8 x 8 pixels into 1437 to train on and 360 to test with, always the same."""
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    return random_split(digits, [1437, 360], generator=torch.Generator().manual_seed(0))


def main(args: argparse.Namespace) -> int:
    """Train, test, and return the exit code."""
    hvd.init()  # hvd
    torch.set_num_threads(1)  # hvd: the ranks of a host share its cores, and the network is small
    torch.manual_seed(args.seed)
    train, test = read_digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # hvd
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    sampler = hvd.data.BalancedSampler(train, args.batch_size, optimizer, seed=args.seed)  # hvd: rows of all ranks
    batches = DataLoader(train, batch_sampler=sampler)
    slow = hvd.rank() == hvd.size() - 1  # hvd

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # hvd
        mean_loss, began = hvd.metrics.Mean("loss"), time.perf_counter()
        for images, labels in batches:
            time.sleep(args.slow_ms / 1e3 * len(images) * slow)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)  # a mean over the rows of this rank
            loss.backward()
            optimizer.step()
            mean_loss.update(loss, len(labels))
        mean = mean_loss.compute()
        if hvd.rank() == 0:  # hvd
            rate = len(train) / (time.perf_counter() - began)
            print(f"epoch {epoch}  loss {mean:.4f}  {rate:,.0f} samples/s  rows of the ranks {sampler.plan}")

    test_batches = DataLoader(test, 256, sampler=hvd.data.ShardedSampler(test, evaluation=True))  # hvd
    mean_accuracy = hvd.metrics.Mean("accuracy")
    for images, labels in test_batches:
        mean_accuracy.update((model(images).argmax(dim=1) == labels).double().mean(), len(labels))
    accuracy = mean_accuracy.compute()
    if hvd.rank() == 0:  # hvd
        print(f"test accuracy {accuracy:.2%} of {len(test)} images")
    return int(accuracy < args.min_accuracy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=96, help="samples in a batch of all ranks together")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="that the last rank sleeps for each sample")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this test accuracy")
    if code := main(parser.parse_args()):
        sys.exit(code)
