"""The script that tells which hosts there are: what it may print, and what it cannot do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hvdkit.errors import LaunchError
from hvdkit.launch.elastic import host_pool
from hvdkit.launch.elastic.host_pool import Discovery, parse_discovered
from hvdkit.launch.hostfiles import Host

ENVIRON = {"PATH": "/usr/bin:/bin"}


def script(folder: Path, text: str) -> str:
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def look(words: str, slots: int | None = None) -> tuple[Host, ...]:
    return asyncio.run(Discovery(words, slots, ENVIRON).find_hosts())


def test_hosts_are_what_it_prints_each_time(tmp_path: Path) -> None:
    found = Discovery(script(tmp_path, f"cat {tmp_path}/hosts"), None, ENVIRON)
    for text, hosts in (("a:2\n\nb:1 # new\n", (Host("a", 2), Host("b", 1))), ("b:1\n", (Host("b", 1),)), ("", ())):
        (tmp_path / "hosts").write_text(text)
        assert asyncio.run(found.find_hosts()) == hosts


def test_a_host_without_slots_has_those_of_the_option(tmp_path: Path) -> None:
    path = script(tmp_path, "echo a; echo b:3")
    assert look(path, 2) == (Host("a", 2), Host("b", 3))
    with pytest.raises(LaunchError, match="--slots-per-host"):
        look(path)


def test_no_shell_reads_the_command_line(tmp_path: Path) -> None:
    path = script(tmp_path, 'for one in "$@"; do echo "$one" >> said; done; echo a:1')
    assert look(f"env --chdir={tmp_path} {path} 'b c' $(id) ;") == (Host("a", 1),)
    assert (tmp_path / "said").read_text().splitlines() == ["b c", "$(id)", ";"]


@pytest.mark.parametrize(
    "line",
    ["-oProxyCommand=x:1", "a b:1", "a;b:1", "$(id):1", "`id`:1", "a|b", "root@-x:1", "[::1;id]:1", "a:-1"],
)
def test_what_is_no_host_is_refused(line: str) -> None:
    with pytest.raises(LaunchError, match=r"hosts\.sh printed lines that cannot be used: line 2"):
        parse_discovered(f"good:1\n{line}\n", "hosts.sh", 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("exit 3", "ended with exit code 3"),
        ("kill -9 $$", "ended with exit code -9"),
        ("sleep 60", "did not end within"),
        ("sleep 60 & sleep 60", "did not end within"),
        ("yes node:1", "printed over"),
        ("head -c 100000 /dev/urandom", "cannot be used"),
    ],
)
def test_one_that_is_of_no_use_is_told_in_time(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "_SCRIPT_S", 0.5)
    with pytest.raises(LaunchError, match=why):
        look(script(tmp_path, text))


def test_one_that_is_not_there_or_no_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a:1\n")
    for words, why in ((str(tmp_path / "no"), "no such program"), ("", "no such"), ("'", "cannot be split")):
        with pytest.raises(LaunchError, match=why):
            Discovery(words, None, ENVIRON)
    with pytest.raises(LaunchError, match="chmod"):
        Discovery(str(tmp_path / "text"), None, ENVIRON)
    (tmp_path / "text").chmod(0o700)
    with pytest.raises(LaunchError, match=r"#!/bin/sh"):
        look(str(tmp_path / "text"))
