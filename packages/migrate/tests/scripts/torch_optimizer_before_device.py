"""Trap: the optimizer is made before the model moves, and a scheduler before that."""
import torch
from torch.utils.data import DataLoader, TensorDataset

device = "cuda:0" if torch.cuda.is_available() else "cpu"


def run():
    torch.manual_seed(3)
    x = torch.randn(128, 3)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(dataset=data, shuffle=True, batch_size=8, drop_last=True)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.RMSprop(
        net.parameters(),
        lr=0.005 / 2,  # half of it
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    net.to(device)
    for epoch in range(6):
        for a, b in loader:
            optimizer.zero_grad()
            loss = ((net(a.to(device)) - b.to(device)) ** 2).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
    return net, ((net(x.to(device)) - x.sum(1, keepdim=True).to(device)) ** 2).mean().item()


if __name__ == "__main__":
	model, final = run()
