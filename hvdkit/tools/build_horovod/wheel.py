"""Wheels of Horovod: compile one, keep it in a cache outside of any source tree, install it, and check it on ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hvdkit.errors import BuildError
from hvdkit.launch.process import describe_status, kill_group, run_program
from hvdkit.tools.build_horovod.plan import Plan, build_environment
from hvdkit.tools.build_horovod.source import HOROVOD, PIP, apply_patches, unpack

_PERCENT = re.compile(r"\[\s*(\d{1,3})%\] ")
_MOST_LINES = 8
_KILLED = re.compile(r"fatal error: Killed signal|internal compiler error: Killed|virtual memory exhausted")
# The first kind that occurs anywhere counts: errors of compiler, CMake and linker before those that they cause.
_KINDS = (
    re.compile(
        r"^\S[^:]*:\d+(:\d+)?: (fatal )?error:"  # gcc, clang
        r"|^\S+\(\d+\): (catastrophic )?error"  # nvcc
        r"|^CMake Error"
        r"|(^|/)ld(\.\w+)?: (cannot find|error)|undefined reference to"
        r"|^(\S+: )?fatal error:"  # the driver: nothing to compile with, or killed
        rf"|{_KILLED.pattern}"
    ),
    re.compile(
        r"^[A-Z]\w*(Error|Exception): "  # Python, in setup.py
        r"|^(g?make|ninja)(\[\d+\])?: \*\*\*"
        r"|^ERROR: |^error: "  # pip and setuptools
    ),
)


def find_percent(log: str) -> int:
    """Find the last percentage that make printed; 0 if there is none."""
    return int((_PERCENT.findall(log) or [0])[-1])


def describe_failure(log: str) -> str:
    """Describe the first error of a failed build, and what to do about it."""
    error = find_first_error(log)
    cure = "\nThe compiler ran out of memory: try again with --jobs 1." if _KILLED.search(error) else ""
    return f"The first error:\n{error}{cure}" if error else "No line of its output is a recognised error."


def find_first_error(log: str) -> str:
    """Find the first error, with the lines that belong to it; "" if none is recognised."""
    lines = [line.rstrip() for line in log.splitlines()]
    for kind in _KINDS:
        for number, line in enumerate(lines):
            if kind.search(line.strip()):  # pip indents what the build prints
                return "\n".join([line.strip(), *_following(lines, number)])
    return ""


def _following(lines: list[str], number: int) -> Iterator[str]:
    """The lines below an error that belong to it are indented more: a compiler's code and caret, CMake's text."""
    depth = len(lines[number]) - len(lines[number].lstrip())
    for line in filter(None, lines[number + 1 : number + 1 + _MOST_LINES]):
        if not line[: depth + 1].isspace():
            return
        yield line[depth:]


_INSTALL_TIMEOUT_S = 300.0
_CHECK_TIMEOUT_S = 180.0
_EVERY_PERCENT = 20
#: Sums rank + 1 over 2 ranks, and checks what is built in.
_CHECK = """
import sys
sys.path = [folder for folder in sys.path if folder]  # not a folder `horovod` in the working directory
import {framework}, horovod.{framework} as hvd
hvd.init()
total = hvd.allreduce({value}, op=hvd.Sum).numpy().tolist()
if hvd.size() != 2 or total != [3.0] * 5:
    sys.exit(f"rank {{hvd.rank()}} of {{hvd.size()}} got {{total}}, not 3.0")
lacking = [name for name in {parts} if not getattr(hvd, name + "_built")()]
if lacking:
    sys.exit(f"it was built without {{lacking}}")
hvd.shutdown()
"""
_VALUES = {"torch": "torch.full((5,), hvd.rank() + 1.0)", "tensorflow": "tensorflow.fill([5], hvd.rank() + 1.0)"}


@dataclass(frozen=True)
class Cache:
    """The folder of wheels, Horovod's source and logs."""

    home: Path

    @property
    def source(self) -> Path:
        """Horovod's archive, downloaded or not."""
        return self.home / "source" / f"horovod-{HOROVOD}.tar.gz"

    def folder(self, plan: Plan) -> Path:
        """The folder for the wheel of this plan, and what it depends on."""
        return self.home / "wheels" / plan.key

    def log(self, plan: Plan) -> Path:
        """The file for the output of the build."""
        return self.home / "logs" / f"{plan.key}.log"

    def find_wheel(self, plan: Plan) -> Path | None:
        """Find the wheel of this plan."""
        return next(iter(sorted(self.folder(plan).glob("*.whl"))), None)

    def add_wheel(self, plan: Plan, wheel: Path) -> Path:
        """Copy a wheel into the cache; another build of the same plan may do the same at the same time."""
        folder = make_folder(self.folder(plan))
        (folder / "built_for.json").write_text(json.dumps(plan.bindings, indent=2, sort_keys=True) + "\n")
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
            part.write(wheel.read_bytes())
        Path(part.name).chmod(0o644)
        os.replace(part.name, folder / wheel.name)
        return folder / wheel.name


def open_cache(chosen: str, environ: Mapping[str, str]) -> Cache:
    """Use the chosen folder, or the usual one: $XDG_CACHE_HOME/hvdkit, ~/.cache/hvdkit without it."""
    if chosen:
        return Cache(Path(chosen).absolute())
    base = environ.get("XDG_CACHE_HOME", "")  # its specification says to ignore a relative one
    return Cache((Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hvdkit" / "horovod")


def make_folder(folder: Path) -> Path:
    """Make a folder of the cache, or raise BuildError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"{folder} cannot be made: {error.strerror}. Choose another one with --cache-dir.") from None
    return folder


def compile_wheel(plan: Plan, archive: Path, cache: Cache) -> Path:
    """Unpack, patch and compile in a temporary folder; returns the wheel in the cache.

    Raises BuildError with the first error in the log, and the log's path.
    """
    log = cache.log(plan)
    make_folder(log.parent)
    with tempfile.TemporaryDirectory(prefix="hvdkit-horovod-") as name:
        tree = unpack(archive, Path(name, "source"))
        apply_patches(tree, plan.patches)
        out = Path(name, "wheel")
        argv = [*PIP, "wheel", "-v", "--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir"]
        argv += ["-w", str(out), str(tree)]
        environ = {**build_environment(plan), **link_libraries(plan, cache)}
        status = _compile(argv, environ, log)
        wheels = sorted(out.glob("*.whl"))
        if status or len(wheels) != 1:
            text = log.read_text(errors="replace")
            raise BuildError(f"The build failed: {describe_status(status)}. {describe_failure(text)}\nLog: {log}")
        return cache.add_wheel(plan, wheels[0])


def link_libraries(plan: Plan, cache: Cache) -> dict[str, str]:
    """Give NCCL's and CUDA's libraries the names that CMake looks for: wheels have libnccl.so.2 and the like only.

    In the cache, not in the build's folder: Horovod's library keeps the path. Returns variables with the folder.
    """
    tools = plan.site.gpu_tools
    nccl = tools.nccl.library if plan.gpu.operations == "NCCL" and tools.nccl is not None else ""
    libraries = {
        "HOROVOD_NCCL_LIB": nccl if not nccl.endswith(".so") else "",
        "CMAKE_LIBRARY_PATH": tools.cuda_runtime if plan.gpu.operations else "",
    }
    variables = {}
    for variable, library in libraries.items():
        if library:
            folder = make_folder(cache.home / "libraries" / plan.key)
            name = Path(library).name
            for link in (f"{name.partition('.so')[0]}.so", name):
                (folder / link).unlink(missing_ok=True)
                (folder / link).symlink_to(library)
            variables[variable] = str(folder)
    return variables


def _compile(argv: list[str], environ: Mapping[str, str], log: Path) -> int:
    """Run the build, print how far its log shows it to be, and return its exit code; all its processes end with it."""
    printed = 0
    with log.open("w") as file, contextlib.ExitStack() as restored:
        for number in (signal.SIGTERM, signal.SIGHUP):
            restored.callback(signal.signal, number, signal.signal(number, _leave))
        process = subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(1.0)
                percent = find_percent(log.read_text(errors="replace"))
                if percent >= printed + _EVERY_PERCENT:
                    printed = percent
                    print(f"compiling: {percent} %", flush=True)
        finally:
            kill_group(process.pid)
            process.wait()


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so the compilers end, and temporary files are removed


def install_wheel(wheel: Path, environ: Mapping[str, str]) -> None:
    """Install a wheel over whatever Horovod is installed; BuildError with pip's output."""
    argv = [*PIP, "install", "--no-deps", "--force-reinstall", "--no-index", str(wheel)]
    result = run_program(argv, environ=environ, timeout_s=_INSTALL_TIMEOUT_S, merge=True)
    if result.status != 0:
        raise BuildError(f"{wheel} could not be installed: {result.ending}. The output of pip:\n{result.stdout}")


def check_horovod(framework: str, parts: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Let 2 ranks import Horovod, reduce once and check that all parts are built in.

    parts: as in Horovod's `..._built()`: mpi, gloo, nccl.
    Raises BuildError with the end of the ranks' output.
    """
    argv = [sys.executable, "-m", "hvdkit.launch", "-np", "2", sys.executable, "-c", build_check(framework, parts)]
    result = run_program(argv, environ=environ, timeout_s=_CHECK_TIMEOUT_S, merge=True)
    if result.status != 0:
        end = "\n".join(result.stdout.splitlines()[-20:])
        raise BuildError(
            f"Horovod is installed and does not work with {framework} on 2 ranks: {result.ending}.\n{end}\n"
            "Build it again with --rebuild; if that does not help, see `hvdkit doctor`."
        )


def build_check(framework: str, parts: tuple[str, ...]) -> str:
    """Build the program that each rank runs."""
    return _CHECK.format(framework=framework, value=_VALUES[framework], parts=parts)
