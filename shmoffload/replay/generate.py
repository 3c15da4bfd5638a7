"""Makes up a multi-turn workload, for demos and tests; nothing to download.

Covers: conversations that share a system prompt and grow turn by turn.
Does not cover: recorded requests (``traces``).
Who calls it: the demo and tests; pure, seeded.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import xxhash

from shmoffload.replay.requests import ReplayRequest, Workload


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Shape of a generated workload.

    Attributes:
        seed: same seed, same requests and blocks.
        num_conversations: they start within ``spread_s``.
        num_turns: requests of each conversation.
        system_blocks: blocks that all prompts begin with.
        blocks_per_turn: fewest and most blocks that a turn adds.
        spread_s: span of the first turns.
        turn_gap_s: shortest and longest pause between turns.
        output_tokens: of each request.
        block_tokens: tokens of a block.
    """

    seed: int = 1
    num_conversations: int = 32
    num_turns: int = 5
    system_blocks: int = 4
    blocks_per_turn: tuple[int, int] = (2, 6)
    spread_s: float = 2.0
    turn_gap_s: tuple[float, float] = (0.7, 1.3)
    output_tokens: int = 32
    block_tokens: int = 512


def generate(shape: MultiTurn) -> Workload:
    """Return the requests of a shape, in order of arrival."""
    rng = random.Random(shape.seed)
    turns: list[tuple[float, int, list[bytes]]] = []
    for conversation in range(shape.num_conversations):
        time_s = rng.uniform(0, shape.spread_s)
        hashes = [_hash(shape.seed, -1, i) for i in range(shape.system_blocks)]
        for _ in range(shape.num_turns):
            more = rng.randint(*shape.blocks_per_turn)
            size = len(hashes)
            hashes = hashes + [
                _hash(shape.seed, conversation, size + i) for i in range(more)
            ]
            tail_tokens = rng.randrange(1, shape.block_tokens)
            turns.append(
                (time_s, len(hashes) * shape.block_tokens + tail_tokens, hashes)
            )
            time_s += rng.uniform(*shape.turn_gap_s)
    turns.sort(key=lambda turn: turn[0])
    requests = [
        ReplayRequest(
            req_id=f"g{i}",
            arrival_s=time_s - turns[0][0],
            num_input_tokens=num_tokens,
            num_output_tokens=shape.output_tokens,
            hashes=hashes,
        )
        for i, (time_s, num_tokens, hashes) in enumerate(turns)
    ]
    return Workload(f"generated, seed {shape.seed}", shape.block_tokens, requests)


def _hash(seed: int, conversation: int, position: int) -> bytes:
    """Name a block; conversations are chains, so place implies the prefix."""
    return xxhash.xxh3_128_digest(b"%d:%d:%d" % (seed, conversation, position))
