"""Predict how diabetes goes on from ten measurements of a patient; see the README here."""

import argparse

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd  # hvd


def read_patients() -> tuple[TensorDataset, TensorDataset]:
    """353 patients to train on and 89 to test with: ten numbers, and the disease a year later, both about 1 large."""
    measured, disease = load_diabetes(return_X_y=True)
    tables = torch.tensor(measured * 21).float(), torch.tensor((disease - 152) / 77).float()
    parts = train_test_split(*tables, test_size=0.2, random_state=0)
    return TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    hvd.init()  # hvd
    torch.set_num_threads(1)  # hvd: the ranks of a host share its cores, and the network is small
    torch.manual_seed(args.seed)
    train, test = read_patients()
    sampler = hvd.data.ShardedSampler(train, seed=args.seed)  # hvd
    batches = DataLoader(train, args.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # hvd
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # hvd
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # hvd
        mean_loss = hvd.metrics.Mean("loss")  # hvd
        for measured, disease in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(measured), disease)
            loss.backward()
            optimizer.step()
            mean_loss.update(loss, len(disease))
        average = mean_loss.compute()  # hvd
        if hvd.rank() == 0:  # hvd
            print(f"epoch {epoch + 1}  loss {average:.4f}")

    measured, disease = test.tensors
    with torch.no_grad():
        left = ((model(measured) - disease) ** 2).sum() / ((disease - disease.mean()) ** 2).sum()
    if hvd.rank() == 0:  # hvd: every rank has the same model, and the test is small
        print(f"test R2 {1 - left:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="passes over the patients")
    parser.add_argument("--batch-size", type=int, default=16, help="patients in a batch of one rank")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
