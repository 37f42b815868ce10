"""The folder of a running job: private, on this host, told from those of other hosts, and gone when nobody holds it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

import pytest
from refused import refused

from hvdkit.launch.state import runtime_dir as folders
from hvdkit.launch.state.runtime_dir import RuntimeDirectory, find_jobs


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found = [tmp_path / "first", tmp_path / "second"]
    for one in found:
        one.mkdir()
    monkeypatch.setattr(folders, "PLACES", tuple(map(str, found)))
    return found


def without_locks(monkeypatch: pytest.MonkeyPatch, *roots: Path, number: int = errno.ENOSYS) -> None:
    """Let flock fail below these folders, as on a file system that has none."""
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if any(root in Path(os.readlink(f"/proc/self/fd/{descriptor}")).parents for root in roots):
            raise OSError(number, os.strerror(number))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EBADF])
def test_where_no_place_has_locks_it_says_so_and_what_to_do(
    number: int, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch, *places, number=number)
    with refused("no-runtime-directory", names=[f"{place}/hvdkit-" for place in places]) as caught:
        RuntimeDirectory()
    assert str(caught.value).count(os.strerror(number)) == len(places)


def test_another_place_is_taken_where_the_first_has_no_locks(
    places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch, places[0])
    with RuntimeDirectory() as path:
        assert places[1] in Path(path).parents
        assert find_jobs() == {str(os.getpid()): path}


def test_a_folder_of_another_host_is_left_alone(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_name_kernel", lambda: "another")
    job = RuntimeDirectory()
    fcntl.flock(job.lock, fcntl.LOCK_UN)  # a lock that this host does not see
    monkeypatch.undo()
    monkeypatch.setattr(folders, "PLACES", tuple(map(str, places)))
    with RuntimeDirectory():
        assert Path(job.path).exists()
        assert job.path not in find_jobs().values()
    job.close()


def test_a_shared_folder_for_temporary_files_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with RuntimeDirectory("test"):
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_a_folder_that_somebody_else_has_prepared_is_not_used(kind: str, places: list[Path]) -> None:
    """Nor can it keep a job from starting: jobs go to a folder with a random name, in which the others find them."""
    taken = places[0] / folders._name_folder()
    if kind == "open":
        taken.mkdir()
        taken.chmod(0o777)
    elif kind == "link":
        (places[0] / "elsewhere").mkdir(0o700)
        taken.symlink_to(places[0] / "elsewhere")
    else:
        taken.touch()
    with RuntimeDirectory() as first, RuntimeDirectory() as second:
        assert Path(first).parent == Path(second).parent, "a random name is used again"
        assert Path(first).parent.parent == places[0] and Path(first).parent != taken
        assert find_jobs() == {Path(path).name: path for path in (first, second)}
        assert len(f"/tmp/{Path(first).parent.name}/4194304-999/control") < 108, "the length of a Unix socket's path"
    if kind != "file":
        assert not list(taken.iterdir())


def test_an_error_says_whose_folder_it_is_and_who_can_remove_it(
    places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)  # so what is made here is another user's
    with refused("no-runtime-directory") as caught:
        RuntimeDirectory()
    assert re.search(rf"drwx------ of user .*\b{owner}\b.*\. The administrator can remove it", str(caught.value))


def test_what_a_killed_job_has_left_goes_from_every_folder_of_the_user(places: list[Path]) -> None:
    (places[0] / folders._name_folder()).touch()
    killed = RuntimeDirectory()
    fcntl.flock(killed.lock, fcntl.LOCK_UN)
    (places[0] / folders._name_folder()).unlink()
    (places[0] / folders._name_folder()).mkdir(0o700)
    with RuntimeDirectory() as path:
        assert Path(path).parent == places[0] / folders._name_folder()
        assert not Path(killed.path).exists()
