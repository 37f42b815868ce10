"""The door of the core: packages and optional rooms import engine and transport from here. Read this page first.

The seven main names:

    Engine          performs named operations among the ranks of a group
    Group           ranks that do collectives among themselves: a process set, with its engine and its transport
    Operation       one collective that a rank has requested by name, and waits for
    Strategy        processes the gradients and parameters of one optimizer in each step
    TensorSource    copies tensors of a framework into buckets and out of them, gradients or parameters
    GradientHook    weights gradients, and is called in each step, beside the strategy
    Buffer          flat memory with a dtype, which a transport reads and writes

How they fit together. init() has an EngineProvider connect the ranks, and makes a Group of all of them. An adapter
(hvdkit.torch, .tensorflow, .keras) turns a tensor into a Buffer and passes it to the Engine of a Group, which announces
an Operation to the other ranks; when all have requested it, the Transport of the group performs it. That is the path
of hvd.allreduce(). Any other collective action takes the same path through collective_step(): a function that uses the
transport runs on all ranks at the same position in the order of operations.

Gradients of an optimizer do not take this path in each step. The adapter describes the parameters once (Parameters:
a TensorSpec of each, a TensorSource of the gradients and another of the values) and attaches a Strategy to them. In
each step it calls arrived(), before_step() and after_step(). The strategy AllReduce divides the tensors into buckets (a
Plan), has the source fill them, reduces them with the transport and has the source drain them.

To add
  a strategy   subclass Strategy and override the calls that it needs; engine/strategy.py documents when each is called
               and which are collective. ParameterValues and FlatValues give a source's tensors as numpy arrays,
               ArrayAverage averages arrays in the background, check_tensors() checks that the tensors of all ranks
               match. A strategy that uses nothing else works with every framework, as strategy= of the wrapped
               optimizer. See hvdkit/strategies.
  an engine    subclass EngineProvider (connects the ranks, opens the Engine of a group) and Engine (submit, do, wait,
               join, leave, close), in a package with an entry point of the group `hvdkit.engines`. See
               packages/horovod.
  a transport  subclass Transport and define its abstract collectives; NumpyArithmetic adds and casts, check_counts()
               and the other checks refuse arguments, SteppedBuckets make progress in steps. See
               examples/extensions/pickled_transport.py.
  a hook       any object with begin_step() and reduced(), passed to set_gradient_hook() of the strategy's driver.
               See hvdkit/keras/balanced_dataset.py.
  a source     an adapter's: fill(), drain() and on_plan(). See hvdkit/torch/source.py, engine/planned/arrays.py.

Code above the adapters imports only names in their `__all__`. tests/repo/test_package_imports.py enforces both rules,
and lists the imports that still bypass this door.
"""

from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.gradient_hook import CollectiveCaller, GradientHook, Seconds
from hvdkit.engine.groups import Group, ProcessSet, check_process_set, global_process_set, group_of
from hvdkit.engine.job_objects import broadcast_object
from hvdkit.engine.named.api import SHUT_DOWN, Engine
from hvdkit.engine.named.joining import Joining
from hvdkit.engine.named.operation import JOIN, JOINING, Action, Operation, OperationRequest
from hvdkit.engine.named.submit import collective_step, do, reduce_options
from hvdkit.engine.planned.agreement import check_tensors
from hvdkit.engine.planned.array_average import ArrayAverage
from hvdkit.engine.planned.plan import Plan, TensorSpec
from hvdkit.engine.planned.reducer import Statistics
from hvdkit.engine.planned.source import Filled, OwnTensors, TensorSource
from hvdkit.engine.planned.values import FlatValues, ParameterValues, zeros_for
from hvdkit.engine.provider import EngineProvider
from hvdkit.engine.reduce_op import Average, ReduceOp, Sum
from hvdkit.engine.request import ReduceOptions, check_gradient
from hvdkit.engine.runtime import is_initialized, on_init, runtime
from hvdkit.engine.startup import Opener
from hvdkit.engine.strategy import Parameters, Strategy, other_engine
from hvdkit.transport.api import Transport, check_alltoall, check_counts, check_root
from hvdkit.transport.arithmetic import Arithmetic, NumpyArithmetic, check_reduction
from hvdkit.transport.backend import Abort
from hvdkit.transport.buckets import (
    ALLREDUCE,
    Buckets,
    BucketSpec,
    InPlaceSegment,
    Phases,
    SteppedBuckets,
    plan_memory,
    see_as,
)
from hvdkit.transport.buffer import COMPLEX, SCALED, STORAGE, Array, Buffer, Narrow, Op, as_buffer, make_buffer
from hvdkit.transport.coding.api import Coding
from hvdkit.transport.division import Groups, check_groups, find_group
from hvdkit.transport.polling import Backoff, check_refused
from hvdkit.transport.rank_subset import RankSubset
from hvdkit.transport.request import Request, closed_before, detach_buffers
from hvdkit.transport.small_collectives import allgather_object, broadcast_bytes, gather_bytes

__all__ = [
    "ALLREDUCE",
    "Abort",
    "Action",
    "AllReduce",
    "Arithmetic",
    "Array",
    "ArrayAverage",
    "Average",
    "Backoff",
    "BucketSpec",
    "Buckets",
    "Buffer",
    "COMPLEX",
    "Coding",
    "CollectiveCaller",
    "Engine",
    "EngineProvider",
    "Filled",
    "FlatValues",
    "GradientHook",
    "Group",
    "Groups",
    "InPlaceSegment",
    "JOIN",
    "JOINING",
    "Joining",
    "Narrow",
    "NumpyArithmetic",
    "Op",
    "Opener",
    "Operation",
    "OperationRequest",
    "OwnTensors",
    "ParameterValues",
    "Parameters",
    "RankSubset",
    "Phases",
    "Plan",
    "ProcessSet",
    "ReduceOp",
    "ReduceOptions",
    "Request",
    "SCALED",
    "SHUT_DOWN",
    "STORAGE",
    "Seconds",
    "Statistics",
    "SteppedBuckets",
    "Strategy",
    "Sum",
    "TensorSource",
    "TensorSpec",
    "Transport",
    "allgather_object",
    "as_buffer",
    "broadcast_bytes",
    "broadcast_object",
    "check_alltoall",
    "check_counts",
    "check_gradient",
    "check_groups",
    "check_process_set",
    "check_reduction",
    "check_refused",
    "check_root",
    "check_tensors",
    "closed_before",
    "collective_step",
    "detach_buffers",
    "do",
    "find_group",
    "gather_bytes",
    "global_process_set",
    "group_of",
    "is_initialized",
    "make_buffer",
    "on_init",
    "other_engine",
    "plan_memory",
    "reduce_options",
    "runtime",
    "see_as",
    "zeros_for",
]
