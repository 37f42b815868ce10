"""Predict how diabetes goes on from ten measurements of a patient."""

import argparse

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def read_patients() -> tuple[TensorDataset, TensorDataset]:
    """353 patients to train on and 89 to test with: ten numbers, and the disease a year later, both about 1 large."""
    measured, disease = load_diabetes(return_X_y=True)
    tables = torch.tensor(measured * 21).float(), torch.tensor((disease - 152) / 77).float()
    parts = train_test_split(*tables, test_size=0.2, random_state=0)
    return TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    torch.manual_seed(args.seed)
    train, test = read_patients()
    batches = DataLoader(train, args.batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    for epoch in range(args.epochs):
        total = 0.0
        for measured, disease in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(measured), disease)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}  loss {total / len(batches):.4f}")

    measured, disease = test.tensors
    with torch.no_grad():
        left = ((model(measured) - disease) ** 2).sum() / ((disease - disease.mean()) ** 2).sum()
    print(f"test R2 {1 - left:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="passes over the patients")
    parser.add_argument("--batch-size", type=int, default=32, help="patients in a batch")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
