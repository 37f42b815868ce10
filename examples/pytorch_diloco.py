"""Ranks that meet after every 20 steps only, by an outer optimizer (DiLoCo) or an average; see the README here."""

import argparse
from typing import Any

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


def wrap(optimizer: torch.optim.Optimizer, model: nn.Module, args: argparse.Namespace) -> Any:
    """The optimizer, whose ranks meet when `--outer` says."""
    fragments: dict[str, Any] = {
        "every": args.every,
        "model": model,  # hvd: synchronize_parameters() averages the statistics of BatchNorm too
        "start_after": 10,  # hvd: the first steps are on averaged gradients, since ranks differ most then
        "fragments": 2,  # hvd: half of the parameters at a time
        "overlap": 2,  # hvd: and the ranks train on for two steps while an average is under way
        "compression": hvd.Compression.fp16,  # hvd
    }
    if args.outer == "average":
        return hvd.LocalSGD(optimizer, **fragments)  # hvd
    return hvd.DiLoCo(optimizer, outer=hvd.OuterSGD(args.outer_lr, args.outer_momentum), **fragments)  # hvd


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    hvd.init()  # hvd
    torch.set_num_threads(1)  # hvd: the ranks of a host share its cores, and the network is small
    torch.manual_seed(args.seed)
    train, test = read_digits()
    sampler = hvd.data.ShardedSampler(train, seed=args.seed)  # hvd: as many batches on each rank
    batches = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)

    layers = [nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
    model = nn.Sequential(*layers)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=args.lr), model, args)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # hvd
        mean_loss = hvd.metrics.Mean("loss")  # hvd
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            mean_loss.update(loss, len(labels))
        average = mean_loss.compute()  # hvd
        if hvd.rank() == 0:  # hvd
            print(f"epoch {epoch + 1}  loss {average:.4f}")

    optimizer.synchronize_parameters()  # hvd: before parameters are evaluated or saved; on all ranks
    model.eval()
    mean_accuracy = hvd.metrics.Mean("accuracy")  # hvd
    for images, labels in DataLoader(test, 256, sampler=hvd.data.ShardedSampler(test, evaluation=True)):  # hvd
        mean_accuracy.update((model(images).argmax(dim=1) == labels).double().mean(), len(labels))
    accuracy = mean_accuracy.compute()  # hvd
    if hvd.rank() == 0:  # hvd
        print(f"test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=16, help="samples in a batch of one rank")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate")
    parser.add_argument("--every", type=int, default=20, help="steps after which the ranks meet")
    parser.add_argument("--outer", choices=["sgd", "average"], default="sgd", help="what becomes of their changes")
    parser.add_argument("--outer-lr", type=float, default=0.7, help="learning rate of the outer optimizer")
    parser.add_argument("--outer-momentum", type=float, default=0.9, help="its momentum")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
