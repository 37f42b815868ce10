"""Exit codes that mean something to who started a program."""

from __future__ import annotations

#: "Saved, not finished: start me again" (EX_TEMPFAIL of sysexits.h).
TRY_AGAIN = 75
