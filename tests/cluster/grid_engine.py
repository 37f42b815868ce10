"""A real Grid Engine on the lab's hosts: sge_qmaster on the first, sge_execd on each, files in the lab's folder.

Debian 12's packages (Son of Grid Engine 8.1.9) are not installed, as they need a mail server: see debian.py.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from cluster.lab import Lab, environment, wait_until

#: With what they need beyond Slurm's packages. 9 MB.
PACKAGES = "gridengine-common gridengine-client gridengine-exec gridengine-master libjemalloc2 libtirpc3".split()
ARCH = "lx-amd64"

# Classic spooling: files that sge_qmaster writes and reads itself.
_BOOTSTRAP = """\
admin_user        none
default_domain    none
ignore_fqdn       true
spooling_method   classic
spooling_lib      libspoolc
spooling_params   {cell}/common;{cell}/spool
binary_path       /usr/lib/gridengine
qmaster_spool_dir {cell}/spool
security_mode     none
listener_threads  2
worker_threads    2
scheduler_threads 1
"""
# What qconf shows its editor, by command, and the lines to change there (slots in two of them). The configuration: jobs
# of root too, and few seconds in place of many. The parallel environment: two ranks a host, and qrsh to the others
# (control_slaves).
_EDITS = {
    "-mconf": {"execd_spool_dir": "{cell}/execd", "min_uid": "0", "min_gid": "0", "load_report_time": "0:0:2"},
    "-msconf": {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"},
    "-ap two_a_host": {"slots": "4", "allocation_rule": "2", "control_slaves": "TRUE", "job_is_first_task": "FALSE"},
    "-aq all.q": {"hostlist": "{hosts}", "pe_list": "two_a_host", "load_thresholds": "NONE"},
}


class GridEngine:
    """Grid Engine on all hosts of a lab that has its packages over /usr."""

    def __init__(self, lab: Lab, usr: Path) -> None:
        self.lab = lab
        self.head = lab.names[0]
        self.root = lab.folder / "sge"
        self.usr = usr
        self.cell = self.root / "default"
        self.environ = environment(SGE_ROOT=str(self.root), SGE_CELL="default", EDITOR=str(self.root / "editor"))
        self.environ["PATH"] += ":/usr/lib/gridengine"

    def up(self) -> None:
        """Start it; all hosts have reported when it returns."""
        self._write()
        self._start(self.head, "sge_qmaster")
        hosts = ",".join(self.lab.names)
        for words in (["-ah", hosts], ["-as", hosts], *(command.split() for command in _EDITS)):
            done = self.run("qconf", *words)
            assert done.returncode == 0, done.stdout + done.stderr + self._logs()
        for name in self.lab.names:
            self._start(name, "sge_execd")
        self.wait_for(lambda: self.run("qstat", "-f").stdout.count(f" {ARCH} ") == len(self.lab.names))
        self.lab.settle()

    def down(self) -> None:
        """End it."""
        for name in self.lab.names:
            self.lab.kill(name, signal.SIGKILL, "/gridengine/sge_")

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run one of its programs on the first host."""
        return self.lab.run(self.head, command, env=self.environ)

    def batch(self, folder: Path, body: str, *options: str) -> tuple[int, str]:
        """Submit a batch script and wait for it; returns its exit code and all that it printed.

        body: below #!/bin/bash. options: qsub's.
        """
        script, output = folder / "job.sh", folder / "job.out"
        script.write_text(f"#!/bin/bash\n{body}\necho ended with $? >{folder}/ended\n")
        self.submit(script, output, *options)
        self.wait_for(lambda: (folder / "ended").exists() and not self.run("qstat").stdout)
        return int((folder / "ended").read_text().split()[-1]), output.read_text()

    def submit(self, script: Path, output: Path, *options: str) -> str:
        """Submit a batch script with this environment; returns its number."""
        words: list[str | Path] = [
            "qsub",
            "-terse",
            "-V",
            "-S",
            "/bin/bash",
            "-j",
            "y",
            "-o",
            output,
            "-wd",
            script.parent,
        ]
        done = self.run(*words, *options, script)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def wait_for(self, true: Callable[[], object], seconds: float = 60) -> None:
        """Wait until something is so; fails with the daemons' messages if it does not come to be."""
        if not wait_until(true, seconds):
            states = self.run("qstat", "-f").stdout + self.run("qstat", "-j", "*").stdout
            raise AssertionError(f"it did not happen within {seconds} s:\n{states}\n{self._logs()}")

    def _start(self, host: str, program: str) -> None:
        done = self.lab.run(host, [f"/usr/lib/gridengine/{program}"], env=self.environ)
        assert done.returncode == 0, done.stdout + done.stderr + self._logs()

    def _write(self) -> None:
        package = self.usr / "share" / "gridengine"
        shutil.copytree(package / "util" / "resources" / "centry", self.cell / "spool" / "centry")
        shutil.copytree(package / "util" / "resources" / "usersets", self.cell / "spool" / "usersets")
        (self.cell / "execd").mkdir()
        (self.cell / "common").mkdir()
        (self.cell / "common" / "bootstrap").write_text(_BOOTSTRAP.format(cell=self.cell))
        (self.cell / "common" / "act_qmaster").write_text(f"{self.head}\n")
        shutil.copy(package / "default-configuration", self.cell / "common" / "configuration")
        for name in ("bin", "utilbin"):  # where a site has its programs
            (self.root / name).mkdir()
            (self.root / name / ARCH).symlink_to("/usr/lib/gridengine")
        (self.root / "util").symlink_to("/usr/share/gridengine/util")
        values = {"cell": self.cell, "hosts": " ".join(self.lab.names)}
        edits = [f"s|^{name} .*|{name} {value}|" for lines in _EDITS.values() for name, value in lines.items()]
        (self.root / "edits").write_text("\n".join(edits).format(**values))
        editor = self.root / "editor"  # qconf takes a file of the same second for unchanged
        editor.write_text(f'#!/bin/sh\nsed -i -f {self.root}/edits "$1" && touch -d tomorrow "$1"\n')
        editor.chmod(0o755)

    def _logs(self) -> str:
        logs = [self.cell / "spool" / "messages", *self.cell.glob("execd/*/messages")]
        return "\n".join(f"{path}:\n{path.read_text(errors='replace')}" for path in logs if path.exists())
