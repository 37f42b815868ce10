"""Checkpoints on disk, whatever happens to who writes them; without a framework."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hvdkit.checkpoint.agreement import steps_between
from hvdkit.checkpoint.arrays import read_arrays, write_arrays
from hvdkit.checkpoint.checkpoints import refuse_options
from hvdkit.checkpoint.directory import CheckpointDirectory
from hvdkit.checkpoint.files import check_archive, open_regular
from hvdkit.checkpoint.manifest import find_flaw
from hvdkit.checkpoint.preemption import Signals
from hvdkit.checkpoint.store import _as_json
from hvdkit.checkpoint.writer import Writer
from hvdkit.errors import CheckpointError

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
FILES = ("a", "b")


def put(shelf: CheckpointDirectory, text: str = "abc", size: int = 0) -> int:
    """Write a checkpoint of two files, the second of so many MiB."""
    folder = shelf.begin()
    with shelf.removing(folder):
        (folder / "a").write_text(text)
        with (folder / "b").open("wb") as file:
            for _ in range(size):
                file.write(os.urandom(1 << 20))
        return shelf.commit(folder, {"by": "a test"})


def newest(shelf: CheckpointDirectory) -> tuple[int | None, list[str]]:
    """The newest whole checkpoint, and why others were passed over."""
    skipped: list[str] = []
    return shelf.newest_whole(FILES, lambda folder, why: skipped.append(f"{folder.name}: {why}")), skipped


def test_the_newest_is_found_and_the_last_few_are_kept(tmp_path: Path) -> None:
    shelf = CheckpointDirectory(tmp_path / "made" / "when needed", keep=2)
    assert newest(shelf) == (None, [])
    assert [put(shelf) for _ in range(4)] == [1, 2, 3, 4]
    assert newest(shelf) == (4, [])
    assert sorted(os.listdir(shelf.path)) == ["checkpoint-000003", "checkpoint-000004"]
    assert sorted(os.listdir(shelf.folder(4))) == ["a", "b", "manifest.json"]
    with pytest.raises(ValueError, match="it must be 1 or more"):
        CheckpointDirectory(tmp_path, keep=0)


def cut(folder: Path) -> None:
    with (folder / "a").open("r+") as file:
        file.truncate(1)


def flip(folder: Path) -> None:
    (folder / "a").write_text("abd")


def manifest(text: str) -> object:
    return lambda folder: (folder / "manifest.json").write_text(text)


def listing(files: str) -> object:
    """A manifest with these files; {} is a file of 3 bytes whose hash is not compared."""
    return manifest(f'{{"format": 1, "files": {{{files}}}}}'.replace("{}", '{"bytes": 3, "sha256": ""}'))


def linked(name: str, target: str) -> object:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return damage


def fifo(name: str) -> object:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


DAMAGE = {
    "a has 1 bytes, but 3 were written": cut,
    "a was changed after it was written: its hash differs": flip,
    "b cannot be read: No such file": lambda folder: (folder / "b").unlink(),
    "manifest.json cannot be read: [Errno 2]": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json cannot be read: Expecting": manifest("{"),
    "manifest.json cannot be read: list indices": manifest("[]"),
    "manifest.json cannot be read: 'files'": manifest('{"format": 1}'),
    "manifest.json cannot be read: its format is 2": manifest('{"format": 2}'),
    "manifest.json cannot be read: '../a' is not a file name": manifest(
        '{"format": 1, "files": {"../a": {"bytes": 1, "sha256": ""}}}'
    ),
    "a is not listed in manifest.json": manifest('{"format": 1, "files": {}}'),
    "manifest.json cannot be read: ": manifest("[" * 200_000),
    "manifest.json cannot be read: cannot convert float infinity": listing('"a": {"bytes": Infinity, "sha256": ""}'),
    "a\0 cannot be read: embedded null": listing('"a": {}, "b": {}, "a\\u0000": {}'),
    ".. cannot be read: it is a directory, not a regular file": listing('"..": {}, "a": {}, "b": {}'),
    "a cannot be read: it is a FIFO, not a regular file": fifo("a"),
    "manifest.json cannot be read: [Errno 22] it is a FIFO, not a regular file": fifo("manifest.json"),
    "manifest.json cannot be read: [Errno 22] it is a character device, not": linked("manifest.json", "/dev/zero"),
}


@pytest.mark.parametrize("why", sorted(DAMAGE))
def test_a_damaged_checkpoint_is_passed_over_and_named(why: str, tmp_path: Path) -> None:
    shelf = CheckpointDirectory(tmp_path)
    put(shelf)
    put(shelf)
    DAMAGE[why](shelf.folder(2))  # type: ignore[operator]
    number, (skipped,) = newest(shelf)
    assert number == 1
    assert skipped.startswith(f"checkpoint-000002: {why}")
    assert put(shelf) == 3, "a damaged one is not written over"


def test_whole_ones_are_not_removed_for_the_sake_of_damaged_ones(tmp_path: Path) -> None:
    shelf = CheckpointDirectory(tmp_path, keep=2)
    put(shelf)
    for damaged in (2, 3):
        put(shelf)
        cut(shelf.folder(damaged))
    put(shelf)
    assert shelf.numbers() == [4, 3, 2, 1]
    put(shelf)
    assert shelf.numbers() == [5, 4]


def test_an_old_checkpoint_may_be_a_link_or_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shelf, elsewhere = CheckpointDirectory(tmp_path / "shelf", keep=1), tmp_path / "another disk"
    put(shelf)
    shelf.folder(1).rename(elsewhere)
    shelf.folder(1).symlink_to(elsewhere)
    assert put(shelf) == 2
    assert os.listdir(shelf.path) == ["checkpoint-000002"]
    assert sorted(os.listdir(elsewhere)) == ["a", "b", "manifest.json"], "what a link leads to is not hvdkit's"
    shelf.folder(1).write_text("not a folder")
    assert put(shelf) == 3
    assert os.listdir(shelf.path) == ["checkpoint-000003"] and not caplog.records


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = CheckpointDirectory(tmp_path, keep=1)
    put(shelf)

    def fail(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", fail)
    assert put(shelf) == 2 and newest(shelf)[0] == 2
    (record,) = caplog.records
    assert "checkpoint-000001 cannot be removed: [Errno 16]" in record.getMessage()
    (left,) = (name for name in os.listdir(tmp_path) if name != "checkpoint-000002")
    assert f"Remove {tmp_path / left} yourself" in record.getMessage(), "the folder that is left has another name"


def test_what_dead_jobs_have_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    host = os.uname().nodename
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = tmp_path / f".hvdkit-{host}-{dead.pid}-1"
    old = tmp_path / ".hvdkit-other.site-77-1"
    kept = [tmp_path / f".hvdkit-{host}-{os.getppid()}-1", tmp_path / ".hvdkit-another-77-1", tmp_path / "notes"]
    for folder in (left, old, *kept):
        folder.mkdir()
        (folder / "a").touch()
    for path in (old, old / "a"):
        os.utime(path, (0, 0))
    put(CheckpointDirectory(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-000001", *(path.name for path in kept)}


SAVE_FOR_EVER = """
import sys
from test_checkpoint import CheckpointDirectory, put
shelf = CheckpointDirectory(sys.argv[1], keep=2)
while True:
    put(shelf, "killed", size=8)
    print("saved", flush=True)
"""


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    paths = (ROOT, *(ROOT / "tests" / room for room in ("support", "jobs")))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_who_is_killed_at_any_moment_leaves_whole_checkpoints_and_no_rest(tmp_path: Path) -> None:
    moments, interrupted = random.Random(1), 0
    for _ in range(6):
        process = start(SAVE_FOR_EVER, str(tmp_path))
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(moments.random() * 0.1)
        process.kill()
        process.communicate()
        shelf = CheckpointDirectory(tmp_path, keep=2)
        assert all(not find_flaw(shelf.folder(number)) for number in shelf.numbers())
        assert shelf.numbers()
        interrupted += sum(name.startswith(".") for name in os.listdir(tmp_path))
        put(shelf)
        assert len(os.listdir(tmp_path)) == 2, os.listdir(tmp_path)
    assert interrupted, "it was never killed while it wrote"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 4 MiB; a limit on the size of files where one may not mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        yield folder
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, before[1]))
    yield folder
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_and_leaves_what_was_there(small_disk: Path) -> None:
    shelf = CheckpointDirectory(small_disk, keep=1)
    put(shelf, size=1)
    with pytest.raises(OSError, match=r"No space left|File too large"):
        put(shelf, size=5)
    assert os.listdir(small_disk) == ["checkpoint-000001"]
    assert newest(shelf) == (1, [])
    assert put(shelf, size=1) == 2


def test_an_error_of_writing_is_raised_by_the_next_call_once() -> None:
    writer = Writer()
    writer.start(lambda: 1 / 0, "saving")
    with pytest.raises(CheckpointError, match="saving failed: ZeroDivisionError: division by zero"):
        writer.start(lambda: None, "again")
    writer.wait()


def test_an_error_that_nobody_asks_for_ends_the_process_badly_and_an_end_waits_for_the_writing(tmp_path: Path) -> None:
    code = (
        "import sys, time; from hvdkit.checkpoint.writer import Writer; from pathlib import Path\nwriter = Writer()\n"
    )
    bad = start(code + "writer.start(lambda: 1 / 0, 'saving')")
    good = start(code + "writer.start(lambda: (time.sleep(0.5), Path(sys.argv[1]).touch()), '')", str(tmp_path / "x"))
    _, errors = bad.communicate(timeout=20)
    assert bad.returncode == 1
    assert b"saving failed: ZeroDivisionError" in errors
    assert good.wait(20) == 0
    assert (tmp_path / "x").exists()


def test_values_that_json_would_change_are_refused() -> None:
    assert json.loads(_as_json({"best": 0.97, "history": [1, 2]})) == {"best": 0.97, "history": [1, 2]}
    for bad in ({"a": (1, 2)}, {"a": {1: 2}}, {"a": object()}, {"a": float("nan")}):
        with pytest.raises(ValueError, match="cannot be saved"):
            _as_json(bad)


@pytest.mark.parametrize(("name", "meant"), [("every", "every_s"), ("evry_s", "every_s"), ("max_to_keep", "keep")])
def test_a_misspelt_option_is_not_saved_as_a_value(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"{name}=3 is no option .* it is {meant}="):
        refuse_options({"best": 0.5, name: 3})
    refuse_options({"best": 0.5, "epoch": 1, "step": 2, "keep_prob": 0.5})


def test_signals_are_kept_in_mind_and_the_programs_own_handler_is_called() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGUSR1)
        signals = Signals()
        assert signals.number == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (signals.number, seen) == (signal.SIGUSR1, [signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.number == signal.SIGTERM
        signals.close()
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_ranks_ask_each_other_seldom_but_not_too_seldom() -> None:
    assert [steps_between(step_s) for step_s in (0.0, 0.001, 0.05, 0.3, 60.0)] == [32, 32, 10, 1, 1]


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        newest(CheckpointDirectory(tmp_path / "file"))
    shutil.rmtree(tmp_path)
    assert newest(CheckpointDirectory(tmp_path)) == (None, [])


def test_arrays_that_do_not_fit_or_would_execute_something_are_refused(tmp_path: Path) -> None:
    arrays = {"weights": [np.arange(3.0), np.ones((2, 2), np.int32)]}
    write_arrays(tmp_path / "whole", arrays)
    for one, two in zip(read_arrays(tmp_path / "whole", arrays)["weights"], arrays["weights"], strict=True):
        np.testing.assert_array_equal(one, two, strict=True)
    with pytest.raises(
        ValueError, match=r"weights.0 is float64 \(3,\) in the checkpoint, but float64 \(4,\) in this job"
    ):
        read_arrays(tmp_path / "whole", {"weights": [np.zeros(4), arrays["weights"][1]]})
    with pytest.raises(ValueError, match=r"different entries: more.0, weights.0, weights.1"):
        read_arrays(tmp_path / "whole", {"more": [np.zeros(4)]})
    np.savez(tmp_path / "objects.npz", **{"weights.0": np.array([Path], dtype=object)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weights\.0 is object"):
        read_arrays(tmp_path / "objects.npz", {"weights": [np.zeros(1)]})
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:100])
    with pytest.raises(ValueError, match="cut cannot be read"):
        read_arrays(tmp_path / "cut", arrays)


def _claim(shape: tuple[int, ...], descr: str = "<f8") -> bytes:
    """An .npy file whose header claims more data than there are."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    return header.getvalue() + bytes(24)


@pytest.mark.parametrize(
    ("entry", "compression", "why"),
    [
        (_claim((1 << 50,)), zipfile.ZIP_STORED, r"weights.0 is float64 \(1125899906842624,\) in the checkpoint"),
        (_claim((3,), "|O"), zipfile.ZIP_STORED, r"weights.0 is object \(3,\) in the checkpoint"),
        (_claim((4,)), zipfile.ZIP_STORED, "weights.0 is float64"),
        (_claim((3,))[:-1], zipfile.ZIP_STORED, "weights.0 cannot be read: EOF"),
        (b"\x93NUMPY\x09\x00", zipfile.ZIP_STORED, "weights.0 cannot be read: its .npy version is"),
        (b"", zipfile.ZIP_STORED, "weights.0 cannot be read: EOF"),
        (_claim((3,)), zipfile.ZIP_DEFLATED, "weights.0.npy in weights is compressed"),
    ],
)
def test_arrays_whose_header_differs_are_refused_before_memory_is_taken_for_them(
    entry: bytes, compression: int, why: str, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "weights", "w", compression) as archive:
        archive.writestr("weights.0.npy", entry)
    with pytest.raises(ValueError, match=why):
        read_arrays(tmp_path / "weights", {"weights": [np.zeros(3)]})


def test_a_zip_archive_cannot_have_more_data_than_bytes(tmp_path: Path) -> None:
    """The entries of an archive may overlap: so it has the same bytes a thousand times."""
    path = tmp_path / "state.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("0", bytes(1000))
        archive.filelist += archive.filelist * 19
    with pytest.raises(ValueError, match="20000 bytes in its entries"), open_regular(path) as file:
        check_archive(file, path.name)
