"""The script that tells which hosts there are: what it may print, and what it cannot do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from refused import refused

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
    with refused("discovery-script-output", names=[path, "--slots-per-host"]):
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
    with refused("discovery-script-output", names=["hosts.sh printed", ": line 2: "]):
        parse_discovered(f"good:1\n{line}\n", "hosts.sh", 1)


@pytest.mark.parametrize(
    ("text", "code", "name"),
    [
        ("exit 3", "discovery-script-failed", "exit code 3."),
        ("kill -9 $$", "discovery-script-failed", "exit code -9."),
        ("sleep 60", "discovery-script-too-slow", "0.5 s"),
        ("sleep 60 & sleep 60", "discovery-script-too-slow", "0.5 s"),
        ("yes node:1", "discovery-script-too-much-output", "1048576 bytes"),
        ("head -c 100000 /dev/urandom", "discovery-script-output", "line "),
    ],
)
def test_one_that_is_of_no_use_is_told_in_time(
    text: str, code: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "_SCRIPT_S", 0.5)
    with refused(code, names=["--host-discovery-script", name]):
        look(script(tmp_path, text))


def test_one_that_is_not_there_or_no_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a:1\n")
    for words, kind in ((str(tmp_path / "no"), "missing"), ("", "missing"), ("'", "quotes")):
        with refused(f"discovery-script-{kind}", names=[f"--host-discovery-script {words!r}"]):
            Discovery(words, None, ENVIRON)
    with refused("discovery-script-not-executable", names=[f"chmod +x {tmp_path / 'text'}"]):
        Discovery(str(tmp_path / "text"), None, ENVIRON)
    (tmp_path / "text").chmod(0o700)
    with refused("discovery-script-not-started", names=[str(tmp_path / "text"), "#!/bin/sh"]):
        look(str(tmp_path / "text"))
