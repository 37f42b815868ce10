"""Each kind of fault, done to a job that runs. What has to be undone is, when the job has got over it or has ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cluster.lab import Lab, wait_until
from saved_world_script import RAISE, SLEEP

from faults.plan import Fault
from faults.run import Run, send

_STOP_S = 5.0
_CUT_S = 2.0
_PATIENCE_S = 20.0
_NOTICED = "No space left"


@dataclass(frozen=True)
class Scene:
    """Where it happens. victim: the process of a rank. disk: of the checkpoints, as node1 sees it. undo: for later."""

    lab: Lab
    run: Run
    victim: int
    disk: Path
    undo: ExitStack


def harm(scene: Scene, fault: Fault) -> float:
    """Let it happen; returns the moment, by time.monotonic()."""
    return _HARM[fault.kind](scene, fault)


def _signal(number: int) -> Callable[[Scene, Fault], float]:
    def act(scene: Scene, fault: Fault) -> float:
        began = time.monotonic()
        send(scene.victim, number)
        return began

    return act


def _stop(scene: Scene, fault: Fault) -> float:
    began = time.monotonic()
    send(scene.victim, signal.SIGSTOP)
    time.sleep(_STOP_S)
    send(scene.victim, signal.SIGCONT)
    return began


def _tell_to_end(scene: Scene, fault: Fault) -> float:
    began = time.monotonic()
    if fault.mood < 0.3:
        scene.run.process.send_signal(signal.SIGTERM)  # which is hvdrun's
    else:
        send(scene.victim, signal.SIGTERM)
    return began


def _kill_newcomer(scene: Scene, fault: Fault) -> float:
    before = set(scene.run.ranks)
    send(scene.victim, signal.SIGKILL)

    def coming() -> list[int]:
        return [pid for number, pid in scene.run.coming.items() if number not in before]

    scene.run.wait_for(lambda: coming() or scene.run.ended, _PATIENCE_S, "another rank in place of one that was killed")
    time.sleep(2 * fault.mood)  # somewhere between its start and its first steps
    began = time.monotonic()
    for pid in coming()[:1]:
        send(pid, signal.SIGKILL)
    return began


def _fill_disk(scene: Scene, fault: Fault) -> float:
    """It has room again when a checkpoint has failed, or (mood) a few have."""

    def failures() -> int:
        return scene.run.output.count(_NOTICED)

    def noticed() -> bool:
        return failures() >= enough or scene.run.ended

    enough = failures() + (1 if fault.mood < 0.5 else 3)
    scene.undo.callback(_fill(scene.lab, scene.disk))
    deadline = time.monotonic() + _PATIENCE_S
    while not wait_until(noticed, 1) and time.monotonic() < deadline:
        _fill(scene.lab, scene.disk)  # what was being written has since taken the place of an older one
    scene.run.wait_for(noticed, 0, _NOTICED)
    return time.monotonic()


def _fill_shared_memory(scene: Scene, fault: Fault) -> float:
    scene.undo.callback(_fill(scene.lab, Path("/dev/shm")))
    began = time.monotonic()
    send(scene.victim, signal.SIGKILL)  # the others need new memory then
    return began


def _cut(scene: Scene, fault: Fault) -> float:
    began = _lose(scene, fault)
    time.sleep(_CUT_S)
    scene.undo.close()
    return began


def _lose(scene: Scene, fault: Fault) -> float:
    host = f"node{2 + int(2 * fault.victim)}"  # not hvdrun's
    began = time.monotonic()
    scene.lab.cut(host)
    scene.undo.callback(scene.lab.mend, host)
    return began


_HARM: dict[str, Callable[[Scene, Fault], float]] = {
    "kill": _signal(signal.SIGKILL),
    "error": _signal(RAISE),
    "slow": _signal(SLEEP),
    "stop": _stop,
    "newcomer": _kill_newcomer,
    "term": _tell_to_end,
    "truncate": _tell_to_end,
    "disk": _fill_disk,
    "shm": _fill_shared_memory,
    "cut": _cut,
    "lost": _lose,
}


def _fill(lab: Lab, folder: Path) -> Callable[[], object]:
    """Leave a file system of node1 no room for one byte more; returns what gives it room again."""
    blocks = os.statvfs(inside(lab, folder)).f_blocks

    def resize(blocks: int) -> str:
        size = blocks * os.statvfs(inside(lab, folder)).f_frsize
        return lab.run("node1", ["mount", "-o", f"remount,size={size}", folder]).stderr

    def shrink() -> bool:
        now = os.statvfs(inside(lab, folder))
        return not resize(max(1, now.f_blocks - now.f_bfree))  # which fails where more has been taken meanwhile

    assert wait_until(shrink, 5), f"{folder} of node1 cannot be made smaller"
    return lambda: resize(blocks)


def inside(lab: Lab, folder: Path) -> Path:
    """A folder as node1 sees it."""
    return Path("/proc", str(lab.hosts["node1"].pid), "root", *folder.parts[1:])


def cut_short(disk: Path) -> Path | None:
    """Take the second half of the newest checkpoint's file away; returns the checkpoint."""
    newest = max(disk.glob("checkpoint-*"), default=None)
    if newest is not None:
        path = newest / "state.pt"
        os.truncate(path, path.stat().st_size // 2)
    return newest
