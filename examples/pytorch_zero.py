"""Divide optimizer state and gradients among the ranks, with checkpoints for any number; see the README here."""

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


def megabytes(optimizer: torch.optim.Optimizer) -> float:
    """The size of the optimizer's state on this rank."""
    return float(sum(value.nbytes for state in optimizer.state.values() for value in state.values())) / 1e6


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    hvd.init()  # hvd
    torch.set_num_threads(1)  # hvd: the ranks of a host share its cores, and the network is small
    torch.manual_seed(args.seed)
    train, test = read_digits()
    sampler = hvd.data.ShardedSampler(train, seed=args.seed)  # hvd
    batches = DataLoader(train, args.batch_size, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(  # hvd
        optimizer,
        named_parameters=model.named_parameters(),
        shard=args.shard,  # hvd: each rank keeps its part of AdamW's two moments, and steps on that part
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    things: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
    if args.checkpoints:
        hvd.checkpoint.load(args.checkpoints, **things)  # hvd: of whatever number of ranks
    for epoch in range(sampler.epoch, args.epochs):
        sampler.set_epoch(epoch)  # hvd
        mean_loss = hvd.metrics.Mean("loss")  # hvd
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            mean_loss.update(loss, len(labels))
        average = mean_loss.compute()  # hvd
        if args.checkpoints:
            hvd.checkpoint.save(args.checkpoints, **things)  # hvd: rank 0 gets all parts, and writes them
        if hvd.rank() == 0:  # hvd
            print(f"epoch {epoch + 1}  loss {average:.4f}  this rank keeps {megabytes(optimizer):.2f} MB of state")

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
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="longest gradient")
    parser.add_argument("--shard", choices=["optimizer", "gradients"], default="gradients", help="what is divided")
    parser.add_argument("--checkpoints", default="", help="folder to save to after each epoch, and to go on from")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
