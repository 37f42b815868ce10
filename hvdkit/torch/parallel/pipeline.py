"""pipeline(): a model divided into stages of about equal time over the pp ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torch.distributed.tensor import DTensor

from hvdkit.errors import ParallelError
from hvdkit.parallel.stages import balance, plan_stages, stages_of_rank
from hvdkit.torch.local_shards import mark_parts
from hvdkit.torch.parallel.chain import check_sharing, find_parts, measure
from hvdkit.torch.parallel.mesh import Mesh, take_mesh
from hvdkit.torch.parallel.modules import Stage, outline_of

Loss = Callable[[Any, Any], torch.Tensor]
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
#: Schedules that compute gradients of inputs and of weights separately. torch then accumulates the latter without
#: autograd, so that no hook sees them. In the first two FSDP2 loses them too.
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
ZERO_BUBBLE = SPLIT_BACKWARD[:2]
#: Possible dtypes of a loss.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Pipeline:
    """The stages of this rank and their schedule; made by pipeline().

    stages: this rank's modules, with the names of the whole model.
    numbers: of these stages.
    count: number of all stages.
    mesh: of the pipeline.
    schedule: its name.
    microbatches: number of micro-batches per batch in step().
    v_shaped: see stages_of_rank().
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        numbers: Sequence[int],
        count: int,
        mesh: Mesh,
        schedule: str,
        microbatches: int,
        *,
        v_shaped: bool = False,
    ) -> None:
        self.stages, self.numbers, self.count, self.mesh = list(stages), list(numbers), count, mesh
        self.schedule, self.microbatches, self._v_shaped = schedule, microbatches, v_shaped
        self._schedule: Any = None
        self._loss_dtype: torch.dtype | None = None
        self._build: Callable[[], Any] = lambda: None

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run forward and backward of one batch; a collective call of the stages of a replica.

        inputs, targets: (batch, ...), the whole batch of this replica, the same for all its stages. Gradients are those
        of the mean loss over the micro-batches. Returns that loss, on all stages, as a tensor of shape ().
        """
        if self.schedule in SPLIT_BACKWARD and any(each._post_accumulate_grad_hooks for each in self.parameters()):
            raise ParallelError(
                f"Pipeline.step(): the schedule {self.schedule} adds gradients of weights up without calling their "
                "hooks, by which DistributedOptimizer learns of them. Use schedule='1F1B' or 'Interleaved1F1B', or "
                "shard(model) and a plain optimizer with 'DualPipeV'."
            )
        return self._run("step", inputs, targets)

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the mean loss like step(), without gradients."""
        return self._run("eval", inputs, targets)

    def _run(self, method: str, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(inputs) % self.microbatches:
            raise ParallelError(
                f"Pipeline.{method}(): a batch of {len(inputs)} cannot be cut into {self.microbatches} equal "
                "micro-batches. Change microbatches, or drop the last batch (DataLoader(drop_last=True))."
            )
        if self._schedule is None:
            self._schedule = self._build()
        last = self.count - 1 in self.numbers
        losses: list[torch.Tensor] = []
        arguments = {"target": targets, "losses": losses} if last else {}
        getattr(self._schedule, method)(*([inputs] if 0 in self.numbers else []), **arguments)
        mean = torch.stack([_whole(loss) for loss in losses]).mean() if last else None
        return mean if mean is not None and self.mesh.pp == 1 else self._broadcast(mean, inputs.device)

    def _broadcast(self, mean: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Send the last stage's mean loss, in its dtype, to all stages; earlier stages do not know that dtype."""
        sent = torch.zeros(2, dtype=torch.float64, device=device)
        if mean is not None:
            sent[0], sent[1] = mean, _DTYPES.index(mean.dtype)
        places = enumerate(self.mesh.ranks("pp"))
        root = next(rank for at, rank in places if self.count - 1 in self._numbers_of(at))
        dist.broadcast(sent, root, group=self.mesh.device_mesh["pp"].get_group())
        if mean is not None:
            return mean
        if self._loss_dtype is None:  # once, because it waits for a GPU
            self._loss_dtype = _DTYPES[int(sent[1])]
        return sent[0].to(self._loss_dtype)

    def _numbers_of(self, place: int) -> list[int]:
        """Return the stages of a rank of the pipeline."""
        return stages_of_rank(place, self.mesh.pp, self.count, v_shaped=self._v_shaped)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages, under the names of the whole model."""
        for stage in self.stages:
            yield from stage.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages."""
        return (parameter for _, parameter in self.named_parameters())

    def train(self, mode: bool = True) -> Pipeline:
        """Set this rank's stages to training, or to evaluation; returns the pipeline."""
        for stage in self.stages:
            stage.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set this rank's stages to evaluation; returns the pipeline."""
        return self.train(False)


def _whole(loss: torch.Tensor) -> torch.Tensor:
    loss = loss.detach()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def pipeline(
    model: nn.Module,
    *,
    loss: Loss,
    example: torch.Tensor,
    microbatches: int,
    schedule: str = "1F1B",
    stages: int | None = None,
    parts: Sequence[str] | None = None,
    costs: Sequence[float] | None = None,
    mesh: Mesh | None = None,
) -> Pipeline:
    """Divide a model into stages of about equal time, and keep those of this rank; a collective call.

    Call it before tensor_parallel(), recompute() and shard(), which take the pipeline in place of the model. The model
    must be a chain: each part takes what the one before it returns, one tensor. On rank 0 it is run once to check that.

    loss: takes (outputs, targets) of a micro-batch and returns their mean loss.
    example: inputs of one micro-batch, (micro-batch, ...).
    microbatches: number of micro-batches in a batch; with more of them ranks are less idle.
    schedule: of torch.distributed.pipelining: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,
    ZBVZeroBubble or DualPipeV; of these the zero-bubble ones not with shard(), and the last three not with
    DistributedOptimizer, which would miss gradients.
    stages: number of all stages; default: one per rank, or two if the schedule allows several.
    parts: patterns of the module names, in the order of the chain; default: the model's children, and those of its
    ModuleLists and Sequentials.
    costs: of each part, in any unit; default: the seconds of forward and backward of the example, measured on rank 0.
    mesh: default: the newest one.

    Raises ParallelError for a model that is not a chain, numbers of stages that do not fit, and unknown schedules.
    """
    mesh = take_mesh(mesh, "pipeline()")
    known = {name.lower(): name for name in SCHEDULES}
    if schedule.lower() not in known:
        raise ParallelError(f"pipeline(): there is no schedule {schedule!r}; use one of {', '.join(SCHEDULES)}.")
    schedule = known[schedule.lower()]
    schedule_class = get_schedule_class(schedule)
    several = issubclass(schedule_class, PipelineScheduleMulti)
    v_shaped = issubclass(schedule_class, (ScheduleZBVZeroBubble, ScheduleDualPipeV))
    names = find_parts(model, parts)
    count = plan_stages(schedule, mesh.pp, len(names), stages, microbatches, several=several, v_shaped=v_shaped)
    outline = outline_of(model)
    costs = measure(model, names, example, costs)
    ranges = balance(costs, count)
    check_sharing(model, [[names[at] for at in each] for each in ranges])
    numbers = stages_of_rank(mesh.coordinates["pp"], mesh.pp, count, v_shaped=v_shaped)
    own = [Stage({names[at]: model.get_submodule(names[at]) for at in ranges[number]}, outline) for number in numbers]
    own = [stage.train(model.training) for stage in own]
    pipe = Pipeline(own, numbers, count, mesh, schedule, microbatches, v_shaped=v_shaped)
    if mesh.pp > 1:
        mark_parts(pipe.parameters())

    def build() -> Any:
        group = mesh.device_mesh["pp"].get_group()
        pairs = zip(pipe.stages, numbers, strict=True)
        made = [PipelineStage(stage, number, count, mesh.device, group=group) for stage, number in pairs]
        for stage, number in zip(made, numbers, strict=True):
            mesh.meter.watch(stage, number)
        mesh.meter.describe(schedule, mesh.pp, len(numbers), microbatches)
        return schedule_class(made if several else made[0], microbatches, loss_fn=loss)

    pipe._build = build
    return pipe


def modules_of(model: nn.Module | Pipeline) -> list[nn.Module]:
    """Return the stages of a pipeline, or the model itself."""
    return list(model.stages) if isinstance(model, Pipeline) else [model]
