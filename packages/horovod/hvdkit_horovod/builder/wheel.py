"""Horovod's source and wheels: downloads, patches and compiles it, caches the wheel, installs and checks it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import FrameType

from hvdkit.errors import BuildError
from hvdkit.launch.process import describe_status, kill_group, run_program
from hvdkit.tools.doctor.collect.probes import probe_argv
from hvdkit_horovod.builder.plan import HOROVOD, Patch, Plan, build_environment

#: The hash of the archive on PyPI.
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_DOWNLOAD_TIMEOUT_S, _INSTALL_TIMEOUT_S, _CHECK_TIMEOUT_S = 600.0, 300.0, 180.0
_EVERY_PERCENT = 20
_PERCENT = re.compile(r"\[\s*(\d{1,3})%\] ")
_MOST_LINES = 8
_KILLED = re.compile(r"fatal error: Killed signal|internal compiler error: Killed|virtual memory exhausted")
# The first kind that occurs anywhere counts: errors of compiler, CMake and linker before the errors that they cause.
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
    """Find the last percentage that make printed; 0 if it printed none."""
    return int((_PERCENT.findall(log) or [0])[-1])


def describe_failure(log: str) -> str:
    """Describe the first error of a failed build, and its cure."""
    error = find_first_error(log)
    cure = "\nThe compiler ran out of memory: try again with --jobs 1." if _KILLED.search(error) else ""
    return f"The first error:\n{error}{cure}" if error else "No line of its output is a recognised error."


def find_first_error(log: str) -> str:
    """Find the first error, with the lines that belong to it; "" if none is recognised."""
    lines = [line.rstrip() for line in log.splitlines()]
    # Without blanks, because pip indents the output of the build.
    at = next((at for kind in _KINDS for at, line in enumerate(lines) if kind.search(line.strip())), len(lines))
    first, *below = [line for line in lines[at : at + 1 + _MOST_LINES] if line] or [""]
    depth = len(first) - len(first.lstrip())
    # Indented more: a compiler's code and caret, CMake's text.
    belonging = takewhile(lambda line: line[: depth + 1].isspace(), below)
    return "\n".join([first.strip(), *(line[depth:] for line in belonging)])


@dataclass(frozen=True)
class Cache:
    """The folder of wheels, Horovod's source and logs."""

    home: Path

    @property
    def source(self) -> Path:
        """The path of Horovod's archive, downloaded or not."""
        return self.home / "source" / f"horovod-{HOROVOD}.tar.gz"

    def folder(self, plan: Plan) -> Path:
        """Return the folder for the wheel of this plan, and for a list of everything it depends on."""
        return self.home / "wheels" / plan.key

    def log(self, plan: Plan) -> Path:
        """Return the file for the output of the build."""
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
        return Path(part.name).replace(folder / wheel.name)


def open_cache(chosen: str, environ: Mapping[str, str]) -> Cache:
    """Open the chosen folder, or the default: $XDG_CACHE_HOME/hvdkit, ~/.cache/hvdkit without it."""
    if chosen:
        return Cache(Path(chosen).absolute())
    base = environ.get("XDG_CACHE_HOME", "")  # its specification excludes relative paths
    return Cache((Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hvdkit" / "horovod")


def make_folder(folder: Path) -> Path:
    """Make a folder of the cache, or raise BuildError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"{folder} cannot be made: {error.strerror}. Choose another one with --cache-dir.") from None
    return folder


def apply_patches(tree: Path, patches: Sequence[Patch]) -> None:
    """Change the files below `tree`. Raises BuildError for a patch whose line does not occur exactly once."""
    for patch in patches:
        path = tree / patch.file
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        places = [number for number, line in enumerate(lines) if line.strip() == patch.old]
        if len(places) != 1:
            raise BuildError(
                f"The source in {tree} cannot be patched: {patch.file} has the line {patch.old!r} {len(places)} times, "
                f"instead of once. Use the unchanged release {HOROVOD}, or compile your source by its own instructions."
            )
        lines[places[0]] = lines[places[0]].replace(patch.old, patch.new) if patch.new else ""
        path.write_text("".join(lines))


def download_source(folder: Path, environ: Mapping[str, str]) -> None:
    """Download the archive with pip, from the index that pip is configured for.

    pip runs the archive's setup.py to read its metadata, so pip itself checks the hash before that.
    Raises BuildError with pip's output.
    """
    argv = [*_PIP, "download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--require-hashes"]
    argv += ["-d", str(folder), "-r", "/dev/stdin"]
    text = f"horovod=={HOROVOD} --hash=sha256:{SOURCE_SHA256}\n"
    result = run_program(argv, environ=environ, timeout_s=_DOWNLOAD_TIMEOUT_S, text=text)
    archive = folder / f"horovod-{HOROVOD}.tar.gz"
    if not archive.is_file():
        raise BuildError(
            f"Horovod's source could not be downloaded: {result.ending}. The output of pip:\n"
            f"{result.stderr.strip() or result.stdout.strip()}\nOn a host without a package index download "
            f"{archive.name} elsewhere and pass it with --source."
        )


def check_source(archive: Path) -> None:
    """Raise BuildError unless an archive is the released one, byte by byte."""
    digest = read_digest(archive)
    if digest != SOURCE_SHA256:
        raise BuildError(
            f"{archive} is not the released source of Horovod {HOROVOD}: its SHA-256 is {digest} and should be "
            f"{SOURCE_SHA256}. Remove the file and try again; --source FILE builds another archive that you trust."
        )


def read_digest(archive: Path) -> str:
    """Compute the SHA-256 of an archive; BuildError if it cannot be read."""
    try:
        return hashlib.sha256(archive.read_bytes()).hexdigest()
    except OSError as error:
        raise BuildError(f"{archive} cannot be read: {error.strerror}. Check the path.") from None


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack an archive and return the folder of its setup.py, at most one level down."""
    if not hasattr(tarfile, "data_filter"):
        raise BuildError(
            f"Python {sys.version.split()[0]} cannot unpack archives safely. Use 3.10.12, 3.11.4 or newer."
        )
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise BuildError(f"{archive} cannot be unpacked: {error}. Download it again.") from None
    files = sorted((*folder.glob("setup.py"), *folder.glob("*/setup.py")))
    if len(files) != 1:
        raise BuildError(f"{archive} has {len(files)} files setup.py, not one: it is not Horovod's source archive.")
    return files[0].parent


def build_wheel(plan: Plan, cache: Cache) -> Path:
    """Build the wheel of a plan into the cache, from a source whose hash is checked unless the user gave it."""
    archive = Path(plan.source) if plan.source else cache.source
    if not plan.source:
        if not archive.is_file():
            download_source(make_folder(archive.parent), plan.site.environ)
        check_source(archive)
    print(f"building Horovod {HOROVOD} with {plan.jobs} compilers; log: {cache.log(plan)}", flush=True)
    start = time.monotonic()
    wheel = compile_wheel(plan, archive, cache)
    print(f"built in {time.monotonic() - start:.0f} s: {wheel}", flush=True)
    return wheel


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
        argv = [*_PIP, "wheel", "-v", "--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir"]
        argv += ["-w", str(out), str(tree)]
        environ = {**build_environment(plan), **link_libraries(plan, cache)}
        status = _compile(argv, environ, log)
        wheels = sorted(out.glob("*.whl"))
        if status or len(wheels) != 1:
            text = log.read_text(errors="replace")
            raise BuildError(f"The build failed: {describe_status(status)}. {describe_failure(text)}\nLog: {log}")
        return cache.add_wheel(plan, wheels[0])


def link_libraries(plan: Plan, cache: Cache) -> dict[str, str]:
    """Link NCCL's and CUDA's libraries under the names that CMake expects: wheels have only names such as libnccl.so.2.

    The links are in the cache, not in the build's folder: Horovod's library keeps the path. Returns variables with the
    folder.
    """
    tools = plan.site.gpu_tools
    nccl = tools.nccl.library if plan.gpu.operations == "NCCL" and tools.nccl is not None else ""
    cuda = tools.cuda_runtime if plan.gpu.operations else ""
    variables = {}
    for variable, library in (("HOROVOD_NCCL_LIB", nccl), ("CMAKE_LIBRARY_PATH", cuda)):
        if library and not library.endswith(".so"):
            folder = make_folder(cache.home / "libraries" / plan.key)
            name = Path(library).name
            for link in (f"{name.partition('.so')[0]}.so", name):
                (folder / link).unlink(missing_ok=True)
                (folder / link).symlink_to(library)
            variables[variable] = str(folder)
    return variables


def _compile(argv: list[str], environ: Mapping[str, str], log: Path) -> int:
    """Run the build, print its progress from its log, and return its exit code; all its processes end with it."""
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
    """Install a wheel over any installed Horovod; BuildError with pip's output."""
    argv = [*_PIP, "install", "--no-deps", "--force-reinstall", "--no-index", str(wheel)]
    result = run_program(argv, environ=environ, timeout_s=_INSTALL_TIMEOUT_S, merge=True)
    if result.status != 0:
        raise BuildError(f"{wheel} could not be installed: {result.ending}. The output of pip:\n{result.stdout}")


def check_horovod(framework: str, parts: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Reduce once on 2 ranks with Horovod; BuildError with their output unless it has all parts: mpi, gloo, nccl."""
    argv = [sys.executable, "-m", "hvdkit.launch", "-np", "2", *probe_argv("try_horovod", framework, *parts)]
    result = run_program(argv, environ=environ, timeout_s=_CHECK_TIMEOUT_S, merge=True)
    if result.status != 0:
        end = "\n".join(result.stdout.splitlines()[-20:])
        raise BuildError(
            f"Horovod is installed and does not work with {framework} on 2 ranks: {result.ending}.\n{end}\n"
            "Build it again with --rebuild; if that does not help, see `hvdkit doctor`."
        )
