"""Plan mode: the product's own decisions on metadata only, in virtual time.

No process, no memory region, no byte: the manager, its slot table and its eviction
policies are the real ones, tiers and clock are not. Deterministic.
"""
