"""Exit codes with a meaning for the caller."""

from __future__ import annotations

#: "Saved, not finished: start me again" (EX_TEMPFAIL of sysexits.h).
TRY_AGAIN = 75
