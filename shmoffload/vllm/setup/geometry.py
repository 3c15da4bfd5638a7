"""Bytes of a block, and the set-ups whose blocks cannot be kept.

Covers: one rank's part of a slot, its tokens, windows, limits of size and of ranks.
Does not cover: what only vLLM's own configuration tells (``release``).
Who calls it: ``settings``; only attributes of vLLM's ``OffloadingConfig`` are read.
"""

from __future__ import annotations

from typing import Any, Final

from shmoffload.errors import BadInputError, ConfigError
from shmoffload.wire.region import MAX_RANKS
from shmoffload.wire.sizes import format_size

MAX_BLOCK_BYTES: Final = 1 << 30
_WINDOW: Final = "sliding_window_size_in_chunks"


def may_have_window(config: Any) -> bool:  # noqa: ANN401
    """Say whether some group may have a sliding window; vLLM tells since 0.33."""
    return any(getattr(group, _WINDOW, 0) is not None for group in config.groups)


def refuse_holes(config: Any) -> None:  # noqa: ANN401
    """Refuse blocks that vLLM 0.32 would store without their first GPU blocks.

    A sliding window that has left a part of a block gives those GPU blocks back. 0.32
    stores the rest, and a later load takes the block as whole. 0.33 does not store
    such a block; it also says which groups have a window, by which we know it.
    """
    groups, per_chunk = config.groups, config.cache.blocks_per_chunk
    has_mended = all(hasattr(each, _WINDOW) for each in groups)
    if per_chunk > 1 and len(groups) > 1 and not has_mended:
        raise BadInputError(
            f"blocks_per_chunk = {per_chunk} with {len(groups)} KV cache groups: this "
            f"vLLM stores blocks of a sliding window with parts missing, so that wrong "
            f"bytes would be loaded: give blocks_per_chunk = 1 (or block_size = a GPU "
            f"block), or take vLLM 0.33"
        )


def part_bytes_of(config: Any) -> int:  # noqa: ANN401
    """Return one rank's bytes of a block, or refuse a set-up without such."""
    block_bytes: int = config.worker_kv_bytes_per_block
    if block_bytes < 1:
        raise BadInputError(
            "vLLM says that a KV block has 0 bytes in this set-up (a KV cache in host "
            "memory, or none): there is nothing to offload; start the server without "
            "--kv-transfer-config"
        )
    num_ranks = config.parallel.world_size
    if num_ranks > MAX_RANKS:
        raise BadInputError(
            f"{num_ranks} GPU workers share one engine, and shmoffload serves at most "
            f"{MAX_RANKS} on one node: use more replicas (--data-parallel-size) of "
            f"fewer GPUs"
        )
    part_bytes: int = block_bytes * config.cache.blocks_per_chunk
    return part_bytes


def tokens_per_key(config: Any) -> float:  # noqa: ANN401
    """Return the tokens that one key stands for, on average.

    With several KV groups as many keys share a token, each with its part of it.
    """
    per_chunk = config.cache.blocks_per_chunk
    tokens: list[int] = [g.tokens_per_block * per_chunk for g in config.groups]
    return 1 / sum(1 / num for num in tokens)


def refuse_large_blocks(config: Any, block_bytes: int) -> None:  # noqa: ANN401
    """Refuse blocks above ``MAX_BLOCK_BYTES``."""
    if block_bytes > MAX_BLOCK_BYTES:
        raise ConfigError(
            f"blocks_per_chunk = {config.cache.blocks_per_chunk} makes a block of "
            f"{format_size(block_bytes)}, and at most {format_size(MAX_BLOCK_BYTES)} "
            f"is possible: lower blocks_per_chunk (or block_size)"
        )
