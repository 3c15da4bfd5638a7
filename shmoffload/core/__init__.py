"""Decides what is stored, loaded, cascaded and evicted; pure.

No clock, system call, lock or thread: calls, replies and time in, jobs out.
A test enforces that this package imports only itself, ``shmoffload.errors``,
numpy and pure parts of the standard library.
"""
