"""Programs that doctor runs by path, each in a process of its own; they print JSON objects, one a line.

Run by path, they see the same packages as a script would, and no module that lies about in the current folder. For the
same reason none of them bears the name of a package.
"""
