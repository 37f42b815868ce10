"""Trap: decisions that hang on a rank's own numbers: a plateau, an early stop, and a batch that is skipped."""
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(2)
    x = torch.rand(200, 2)
    loader = DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=10, shuffle=True)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=1)
    for epoch in range(30):
        total = 0.0
        for i, (a, b) in enumerate(loader):
            if i >= 15:
                break  # of every rank at the same batch
            optimizer.zero_grad()
            loss = (net(a) - b).square().mean()
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step(total / len(loader))
        if total / len(loader) < 2e-4:
            print("good enough after", epoch)
            break
    return net, (net(x) - x.mean(1, keepdim=True)).square().mean().item()


if __name__ == "__main__":
    model, final = main()
