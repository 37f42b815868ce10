"""Lightning's Trainer."""

import os

import lightning
import torch
from problem import BATCH, RATE, make_data, make_model, report
from torch.utils.data import DataLoader, DistributedSampler


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def training_step(self, batch, index):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.model(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)

    def train_dataloader(self):
        data, size = make_data(), self.trainer.world_size
        return DataLoader(data, BATCH // size, sampler=DistributedSampler(data, shuffle=False))


trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
)
module = Regression()
trainer.fit(module)
report(trainer.global_rank, trainer.world_size, list(module.parameters()))
