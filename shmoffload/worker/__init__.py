"""Tier workers: one process per secondary tier; moves bytes, decides nothing.

Covers: the tier interface (``tier``), its registry, the process around one tier,
the tiers that ship (``tiers/``).
Does not cover: which block goes where (``core``), starting and killing
(``supervisor``).
Who calls it: the supervisor by exec (``python -m shmoffload.worker``); engine and
command line import ``registry`` only.

A reader starts with ``tier`` (what a tier author writes), then ``serve`` (main
thread), ``executor`` (I/O threads), ``replies`` (how a job is answered). Neither
torch nor vllm nor multiprocessing is imported here; a test looks.
"""
