"""A real Grid Engine on the hosts of the lab: sge_qmaster on the first, sge_execd on each, all files in the lab's folder.

Debian 12's packages (Son of Grid Engine 8.1.9) are not installed, as they would bring a mail server: see debian.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from cluster.lab import Lab, environment, wait_until

PACKAGES = ("gridengine-common", "gridengine-client", "gridengine-exec", "gridengine-master", "libjemalloc2")

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
# Jobs of root, and their daemons on other hosts started by Grid Engine itself.
_CONFIGURATION = """\
execd_spool_dir  {cell}/execd
min_uid          0
min_gid          0
load_report_time 00:00:02
loglevel         log_info
gid_range        20000-20100
qlogin_command   builtin
qlogin_daemon    builtin
rlogin_command   builtin
rlogin_daemon    builtin
rsh_command      builtin
rsh_daemon       builtin
"""
