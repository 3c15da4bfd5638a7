"""The tiers that ship: ``slab``, ``fs``, ``memory``; each in its own module.

Covers: storage, index, capacity and eviction of one tier each.
Does not cover: queues, threads, deadlines, checksums (the framework around them).
Who calls it: ``worker.registry.load_tier``, in the tier's worker process only.
"""
