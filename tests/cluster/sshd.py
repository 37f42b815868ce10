"""What stands in each host's /etc: names, and ssh with keys of its own that asks for nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from cluster.network import wire_address

_CLIENT = """\
Host *
    User root
    IdentityFile {folder}/ssh/id
    IdentitiesOnly yes
    StrictHostKeyChecking yes
    UserKnownHostsFile /dev/null
    GlobalKnownHostsFile {folder}/ssh/known_hosts
    LogLevel ERROR
"""
_SERVER = """\
ListenAddress {address}
HostKey {folder}/ssh/{name}
AuthorizedKeysFile {folder}/ssh/id.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100:30:200
MaxSessions 100
Subsystem sftp internal-sftp
"""


def write_ssh(folder: Path, names: Sequence[str]) -> None:
    """Write folder/ssh with keys for all, and folder/etc/NAME for each host."""
    keys = folder / "ssh"
    keys.mkdir(mode=0o700)
    known = []
    for name in ("id", *names):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", keys / name], check=True)
        key = " ".join((keys / f"{name}.pub").read_text().split()[:2])
        if name != "id":
            known.append(f"{name},{wire_address(names.index(name) + 1)} {key}\n")
    (keys / "known_hosts").write_text("".join(known))
    addresses = "".join(f"{wire_address(number)} {name}\n" for number, name in enumerate(names, start=1))
    for number, name in enumerate(names, start=1):
        etc = folder / "etc" / name
        (etc / "ssh").mkdir(parents=True)
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
        (etc / "hostname").write_text(f"{name}\n")
        (etc / "resolv.conf").write_text("")
        (etc / "ssh" / "ssh_config").write_text(_CLIENT.format(folder=folder))
        (etc / "ssh" / "sshd_config").write_text(_SERVER.format(folder=folder, name=name, address=wire_address(number)))
