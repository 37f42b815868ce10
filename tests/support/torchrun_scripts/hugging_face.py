"""transformers' Trainer, with a model that a configuration makes."""

import json
import os
import sys

import torch
import transformers
from torch.utils.data import Dataset, SequentialSampler

LENGTH, VOCABULARY, ROWS = 12, 40, 48
WHOLE = 8  # rows of a batch of all ranks


class Rows(Dataset):
    """Sentences that count on from a number."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        words = (torch.arange(LENGTH) + index) % VOCABULARY
        return {"input_ids": words, "labels": words}


class InOrder(transformers.Trainer):
    """Without shuffling, so that numbers of ranks can be compared."""

    def _get_train_sampler(self, *arguments):
        return SequentialSampler(self.train_dataset)


transformers.set_seed(1)
config = transformers.GPT2Config(
    n_layer=1, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
model = transformers.GPT2LMHeadModel(config)
size = int(os.environ.get("WORLD_SIZE", "1"))
arguments = transformers.TrainingArguments(
    output_dir=sys.argv[1],
    use_cpu=True,
    per_device_train_batch_size=WHOLE // size,
    num_train_epochs=1,
    learning_rate=0.1,
    lr_scheduler_type="constant",
    optim="sgd",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = InOrder(model=model, args=arguments, train_dataset=Rows())
trainer.train()
backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else ""
weights = [float(value) for one in model.parameters() for value in one.detach().flatten()]
print(json.dumps({"rank": arguments.process_index, "size": arguments.world_size, "backend": backend, "weights": weights}))
