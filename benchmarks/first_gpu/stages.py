"""The stages of a run on the first GPU, as data: what each runs, for how long at most, and what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Stand for the path of the result file and of the interpreter in the arguments of a stage.
RESULT, PYTHON = "{result}", "{python}"


@dataclass(frozen=True)
class Stage:
    """A program that is run once.

    name: of the stage, also of its folder.
    about: one line for the report.
    arguments: of Python; with RESULT and PYTHON in them.
    kind: of the result file: "tests" (JUnit), "bench" (the JSON of hvdkit bench) or "facts" (a JSON object).
    limit_s: seconds after which the program is ended.
    needs: packages without which the stage is not run.
    why_not: the reason if this device has no such stage; "" if it has.
    """

    name: str
    about: str
    arguments: Sequence[str]
    kind: str
    limit_s: float
    needs: Sequence[str] = ("torch",)
    why_not: str = ""


def plan_stages(device: str, gpus: int) -> tuple[Stage, ...]:
    """Plan the stages, the most important first.

    device: "cuda", or "cpu" for a rehearsal.
    gpus: number of GPUs that this process sees; two ranks share the only one.
    """
    cuda = device == "cuda"
    two = ["-np", "2", *(["--share-gpus"] if cuda and gpus < 2 else [])]
    measured = ["--rounds", "7"] if cuda else ["--rounds", "3", "--seconds", "0.02", "--models", "layers"]
    sizes = "4K,64K,1M,16M,256M" if cuda else "4K,1M"
    memory = ["-m", "hvdkit.launch", *two, PYTHON, "-m", "benchmarks.first_gpu.memory", device, RESULT]
    return (
        Stage(
            "environment",
            "versions, processors, GPUs and drivers",
            ["-m", "benchmarks.first_gpu.environment", RESULT],
            "facts",
            100,
            needs=(),
        ),
        _plan_tests(device, "training", "two ranks train as one process with the whole batch", "train_as_one", 90),
        _plan_tests(device, "waits", "the host waits for nothing in a step", "waits or visits or recording", 90),
        _plan_tests(device, "collectives", "named collectives on tensors of the device", "named_collectives", 60),
        _plan_tests(device, "killed", "a rank is killed in an allreduce, and in backward", "killed", 60),
        _plan_bench(device, "step-1", "a training step of one rank", ["step", "-np", "1", *measured], 120),
        _plan_bench(device, "step-2", "a training step of two ranks", ["step", *two, *measured], 120),
        _plan_bench(device, "allreduce", "an allreduce of two ranks", ["allreduce", *two, "--sizes", sizes], 90),
        Stage("memory", "memory of a rank on its device, with buckets and without", memory, "facts", 60),
        _plan_tests(
            device,
            "graphs",
            "a CUDA graph replays a step, or is refused with the reason",
            "cuda_graph",
            45,
            why_not="" if cuda else "CUDA graphs need a GPU",
        ),
        *(
            _plan_tests(
                device,
                f"keras-{backend}",
                f"Keras on {backend} trains as one process",
                backend,
                60,
                file="test_gpu_keras.py",
                needs=("keras", backend),
            )
            for backend in ("torch", "jax", "tensorflow")
        ),
    )


def _plan_tests(
    device: str,
    name: str,
    about: str,
    chosen: str,
    limit_s: float,
    *,
    file: str = "test_gpu.py",
    needs: Sequence[str] = ("torch",),
    why_not: str = "",
) -> Stage:
    """Plan a stage of tests in tests/gpu, which have a case for each device: on the CPU they are slow tests."""
    mark, cases = ("gpu", f"({chosen}) and cuda") if device == "cuda" else ("slow", f"({chosen}) and cpu")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={RESULT}", f"tests/gpu/{file}"]
    return Stage(name, about, [*words, "-m", mark, "-k", cases], "tests", limit_s, needs, why_not=why_not)


def _plan_bench(device: str, name: str, about: str, words: Sequence[str], limit_s: float) -> Stage:
    command = ["-m", "hvdkit", "bench", *words, "--device", device, "--output", RESULT]
    return Stage(name, about, command, "bench", limit_s)
