"""What cannot be moved to hvdkit by changing lines, with the reason and the way round."""

from __future__ import annotations

import libcst as cst

from hvdkit.tools.migrate.draft import Draft
from hvdkit.tools.migrate.script import last, matches

_RANKS = "hvdrun starts the ranks: call the function itself, once in each process"

#: Modules and functions -> what is wrong with them on many ranks, what to do.
_FOREIGN: dict[tuple[str, ...], tuple[str, str]] = {
    ("pytorch_lightning.Trainer", "lightning.Trainer", "lightning.pytorch.Trainer"): (
        "Lightning trains with a distribution of its own, into which hvdkit does not fit.",
        "Lightning's strategy='ddp' under torchrun; or a training loop of your own",
    ),
    ("transformers.Trainer", "transformers.Seq2SeqTrainer"): (
        "this Trainer has a training loop and a distribution of its own.",
        "torchrun with the script as it is; or a training loop of your own",
    ),
    ("accelerate.Accelerator",): (
        "accelerate wraps model, optimizer and data itself, a second time beside hvdkit.",
        "take accelerator.prepare() and accelerator.backward() out, then migrate",
    ),
    ("deepspeed.initialize", "fairscale."): ("shards or wraps the optimizer itself.", "take it out, then migrate"),
    ("opacus.",): (
        "counts samples and adds noise for one process.",
        "opacus's own DistributedDPOptimizer, without hvdkit",
    ),
    ("fastai.", "ignite.distributed."): ("has a training loop and a distribution of its own.", "a loop of your own"),
    ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"): (
        "processes that the script starts itself cannot be turned into hvdkit's ranks.",
        f"{_RANKS}, as main(hvd.rank(), hvd.size()), with hvd.init() before it",
    ),
    ("torch.multiprocessing.Process",): ("processes that train beside hvdkit's ranks.", _RANKS),
    (
        "torch.distributed.fsdp.",
        "torch.distributed.tensor.",
        "torch.distributed.pipelining.",
        "torch.distributed.rpc.",
    ): (
        "splits the model itself over the ranks, which hvdkit does not do.",
        "stay with torch.distributed for this model: torchrun starts it",
    ),
    ("torch.distributed.optim.ZeroRedundancyOptimizer",): (
        "splits the optimizer's state over the ranks, which hvdkit does not do.",
        "the optimizer that it is given, by itself, then migrate",
    ),
    (
        "tensorflow.Session",
        "tensorflow.compat.v1.Session",
        "tensorflow.ConfigProto",
        "tensorflow.compat.v1.ConfigProto",
    ): (
        "TensorFlow 1's sessions are not there in Keras 3.",
        "leave it out; for GPUs: tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU') after hvd.init()",
    ),
    ("keras.backend.set_session", "keras.backend.get_session", "tensorflow.compat.v1.keras.backend.set_session"): (
        "Keras 3 has no sessions.",
        "leave it out; for GPUs: tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU') after hvd.init()",
    ),
    (
        *("tensorflow.train.MonitoredTrainingSession", "tensorflow.compat.v1.train.", "tensorflow.estimator."),
        *("tensorflow.placeholder", "tensorflow.compat.v1.placeholder", "tensorflow.global_variables_initializer"),
        *("tensorflow.compat.v1.disable_v2_behavior", "tensorflow.disable_v2_behavior", "tensorflow.contrib."),
        *("tensorflow.compat.v1.disable_eager_execution", "tensorflow.app.run", "tensorflow.app.flags"),
        *(
            "tensorflow.train.AdamOptimizer",
            "tensorflow.train.GradientDescentOptimizer",
            "tensorflow.train.RMSPropOptimizer",
        ),
    ): (
        "TensorFlow 1: its graphs and sessions are not supported.",
        "a loop with tf.GradientTape, as examples/tensorflow2_digits.py",
    ),
    ("tensorflow.distribute.",): (
        "tf.distribute is another way to train on many devices, beside hvdkit's.",
        "take the strategy and `with strategy.scope():` out, then migrate",
    ),
    ("keras.utils.multi_gpu_model",): (
        "is not there in Keras 3; hvdrun starts a rank for each GPU.",
        "the model itself",
    ),
}


def report_foreign(draft: Draft) -> None:
    """Report what does its own distribution, and TensorFlow 1."""
    script = draft.script
    found: set[tuple[str, ...]] = set()
    for node in [*script.all(cst.Call), *script.all(cst.Attribute), *script.all(cst.Decorator)]:
        name = script.name(node.decorator if isinstance(node, cst.Decorator) else node)
        for names, (what, write) in _FOREIGN.items():
            if matches(name, names) and names not in found:
                found.add(names)
                draft.breaks(
                    node,
                    f"{name.removeprefix('tensorflow.compat.v1.')}: {what}",
                    write.replace("hvd.", f"{draft.hvd}."),
                )


def report_by_hand(draft: Draft) -> None:
    """Report training that no optimizer does, and gradients that hvdkit does not see."""
    script = draft.script
    for call in script.calls("torch.autograd.grad"):
        if not any(arg.keyword is not None and arg.keyword.value == "create_graph" for arg in call.args):
            draft.breaks(
                call,
                "these gradients do not pass through an optimizer, and stay each rank's own.",
                f"{draft.hvd}.allreduce(gradient) if weights are changed by them; else the comment `# hvdkit: ok`",
            )
    for call in script.all(cst.Call):
        if last(call) == "share_memory" and isinstance(call.func, cst.Attribute):
            draft.breaks(call, "trains in several processes already.", _RANKS)
    for assign in script.all(cst.AugAssign):
        if ".grad" in script.code(assign.value) and not script.code(assign.target).endswith("norm"):
            draft.breaks(
                assign,
                "weights that are changed by hand with a rank's own gradient.",
                "an optimizer of torch.optim; where one has reduced the gradient already, the comment `# hvdkit: ok`",
            )
