"""Reports code that cannot be moved to hvdkit by changes of lines, with the reason and the alternative."""

from __future__ import annotations

import libcst as cst

from hvdkit_migrate.draft import Draft
from hvdkit_migrate.script import last, matches

_RANKS = "hvdrun starts the ranks: call the function itself, once in each process"

#: Modules and functions -> their problem on many ranks, and the cure.
_FOREIGN: dict[tuple[str, ...], tuple[str, str]] = {
    ("pytorch_lightning.Trainer", "lightning.Trainer", "lightning.pytorch.Trainer"): (
        "Lightning distributes the training itself, by the strategy of its Trainer.",
        "lightning.Trainer(strategy='hvdkit') after `import hvdkit.lightning`; or the unchanged script under hvdrun",
    ),
    ("transformers.Trainer", "transformers.Seq2SeqTrainer"): (
        "this Trainer has its own training loop and distribution.",
        "the unchanged script under hvdrun; or your own training loop",
    ),
    ("accelerate.Accelerator",): (
        "accelerate wraps model, optimizer and data itself; hvdkit would wrap them a second time.",
        "remove accelerator.prepare() and accelerator.backward(), then migrate",
    ),
    ("deepspeed.initialize", "fairscale."): ("shards or wraps the optimizer itself.", "remove it, then migrate"),
    ("opacus.",): (
        "counts samples and adds noise for one process.",
        "opacus's own DistributedDPOptimizer, without hvdkit",
    ),
    ("fastai.", "ignite.distributed."): ("has its own training loop and distribution.", "your own training loop"),
    ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"): (
        "processes that the script starts cannot become hvdkit's ranks.",
        f"{_RANKS}, as main(hvd.rank(), hvd.size()), with hvd.init() before it",
    ),
    ("torch.multiprocessing.Process",): ("starts training processes beside hvdkit's ranks.", _RANKS),
    (
        "torch.distributed.fsdp.",
        "torch.distributed.tensor.",
        "torch.distributed.pipelining.",
        "torch.distributed.rpc.",
    ): (
        "shards the model over the ranks, which this command cannot migrate.",
        "keep torch.distributed for this model",
    ),
    ("torch.distributed.optim.ZeroRedundancyOptimizer",): (
        "shards the optimizer's state over the ranks.",
        "the inner optimizer alone, then migrate",
    ),
    (
        "tensorflow.Session",
        "tensorflow.compat.v1.Session",
        "tensorflow.ConfigProto",
        "tensorflow.compat.v1.ConfigProto",
    ): (
        "Keras 3 has no TensorFlow 1 sessions.",
        "remove it, for GPUs: tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU') after hvd.init(); without "
        "Keras it stays in graphs for tf.compat.v1.Session",
    ),
    ("keras.backend.set_session", "keras.backend.get_session", "tensorflow.compat.v1.keras.backend.set_session"): (
        "Keras 3 has no sessions.",
        "remove it; for GPUs: tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU') after hvd.init()",
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
        "Keras 3 does not support graphs and sessions of TensorFlow 1.",
        "a loop with tf.GradientTape, as examples/tensorflow2_digits.py; or, without Keras, import "
        "tensorflow.compat.v1 as tf, call tf.disable_v2_behavior(), and run the script with hvdrun --alias-horovod",
    ),
    ("tensorflow.distribute.",): (
        "tf.distribute is a second distribution strategy beside hvdkit.",
        "remove the strategy and `with strategy.scope():`, then migrate",
    ),
    ("keras.utils.multi_gpu_model",): (
        "Keras 3 does not have it; hvdrun starts one rank per GPU.",
        "the model itself",
    ),
}


def report_foreign(draft: Draft) -> None:
    """Report libraries that distribute the training themselves, and TensorFlow 1."""
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
    """Report training without an optimizer, and gradients that hvdkit does not see."""
    script = draft.script
    for call in script.calls("torch.autograd.grad"):
        if not any(arg.keyword is not None and arg.keyword.value == "create_graph" for arg in call.args):
            draft.breaks(
                call,
                "these gradients do not pass through an optimizer and are not reduced.",
                f"{draft.hvd}.allreduce(gradient) if they update weights; else the comment `# hvdkit: ok`",
            )
    for call in script.all(cst.Call):
        if last(call) == "share_memory" and isinstance(call.func, cst.Attribute):
            draft.breaks(call, "already trains in several processes.", _RANKS)
    for assign in script.all(cst.AugAssign):
        if ".grad" in script.code(assign.value) and not script.code(assign.target).endswith("norm"):
            draft.breaks(
                assign,
                "updates weights by hand with the gradient of one rank.",
                "an optimizer of torch.optim; if one has already reduced the gradient, the comment `# hvdkit: ok`",
            )
