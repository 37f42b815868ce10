"""Trap: everything is in functions, and the lengths of datasets stand in averages."""

from __future__ import print_function
import argparse

import torch
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    total = 0.
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(data)
        if batch_idx % args.log_interval == 0:
            print('Train Epoch: {} [{}/{}]\tLoss: {:.6f}'.format(
                epoch, batch_idx * len(data), len(train_loader.dataset),
                loss.item()))   # of this batch
    print("mean loss", total / len(train_loader.dataset))


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data, target in test_loader:
            test_loss += F.cross_entropy(model(data.to(device)), target.to(device), reduction='sum').item()
    test_loss /= len(test_loader.dataset)

    print('\nTest set: Average loss: {:.4f}\n'.format(test_loss))
    return test_loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--lr', type=float, default=0.02)
    parser.add_argument('--log-interval', type=int, default=10)
    args = parser.parse_args([])
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs = torch.randn(403, 6)  # not a multiple of two
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    train_loader = DataLoader(data, batch_size=16, shuffle=True)
    test_loader = DataLoader(data, batch_size=100)
    model = torch.nn.Linear(6, 2).to(device)
    optimizer = optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(1, 4):
        train(args, model, device, train_loader, optimizer, epoch)
        final = test(model, device, test_loader)
    return model, final


if __name__ == '__main__':
    model, final = main()
