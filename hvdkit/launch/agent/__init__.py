"""The rank agent: runs one rank's command, relays its output, and reports to hvdrun how it ended.

mpirun starts it by this folder's path under `python -I -S`, once for each rank. It uses the standard library only, and
of hvdkit only this folder.

    mpirun -- agent -- the rank's command (a session of its own)
                |
                +-- one connection to hvdrun: hello, start, output, end ->    <- go, stop, bye, signals, window size

If the connection breaks, hvdrun has ended and the agent ends its rank. Without HVDKIT_CONTROL it works alone and
writes to its own stdout and stderr.
"""
