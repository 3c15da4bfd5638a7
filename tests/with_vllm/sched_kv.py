"""A model whose KV is a hash of the tokens, in GPU blocks that vLLM describes.

Covers: the cache geometry of a plain model and of one with three KV groups (full,
sliding window, side: F52), writing the KV of new tokens, reading and checking the
KV of every earlier token, the token that comes next.
Does not cover: which blocks a request has (vLLM's scheduler says).
Who calls it: ``sched_loop``.

The value at a position depends on all tokens up to it, on the layer and on the
plane, so a block of another prompt, another place, another layer or another time
cannot pass; nor can another rank's. The next token is computed from what was read,
not from what should have been there: a wrong byte changes the text as well.
"""

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

BLOCK_TOKENS = 16
VOCABULARY = 250
_FIRST = 12345
_WORD_BYTES = 8
_RANK_SHIFT = 50


def next_hash(before, token):
    """Return the hash of one token more; ``before`` is None in front of the first."""
    seed = _FIRST if before is None else before & 0xFFFFFFFF
    return zlib.crc32(int(token).to_bytes(4, "little"), seed) | 1 << 40


def next_token(values):
    """Return the token that follows KV ``values`` (of all positions, one layer)."""
    return int(np.bitwise_xor.reduce(values) % VOCABULARY)


def reference(prompt, num_tokens):
    """Return what the model says after ``prompt``, with no cache anywhere."""
    values, before = [], None
    for token in prompt:
        before = next_hash(before, token)
        values.append(before)
    folded = np.bitwise_xor.reduce(np.array(values, dtype=np.int64))
    said = []
    for _ in range(num_tokens):
        said.append(int(folded % VOCABULARY))
        before = next_hash(before, said[-1])
        folded ^= np.int64(before)
    return said


@dataclass(frozen=True)
class Group:
    """One KV group: its layers, and what of the past it attends to."""

    layers: tuple[str, ...]
    planes: int = 2
    window: int | None = None

    def spec(self):
        head = {"num_kv_heads": 1, "head_size": self.planes, "dtype": torch.float32}
        if self.window is not None:
            return SlidingWindowSpec(
                block_size=BLOCK_TOKENS, sliding_window=self.window, **head
            )
        page = page_bytes() if self.planes != 2 else None
        return FullAttentionSpec(block_size=BLOCK_TOKENS, page_size_padded=page, **head)


def page_bytes():
    """Bytes of one GPU block of one layer, padding included."""
    return 2 * BLOCK_TOKENS * _WORD_BYTES


PLAIN = (Group(("f0", "f1", "f2")),)
THREE_GROUPS = (
    Group(("f0", "f1")),
    Group(("w0", "w1"), window=2 * BLOCK_TOKENS),
    Group(("s0",), planes=1),
)
"""Layers of one place in their groups lie over each other, as in a real server: a
GPU block belongs to one group at a time. The side group's pages are padded."""


class FakeKv:
    """KV tensors of all layers of one rank, and the forward pass over them.

    Attributes:
        config: vLLM's description of the caches.
        caches: layer name -> tensor, for ``register_kv_caches``.
        num_mismatches: reads of wrong bytes, one per (request, layer, step).
        faults: the first of them, one line each.
    """

    def __init__(self, groups, num_blocks, rank=0):
        self.groups = groups
        self._of_rank = rank << _RANK_SHIFT
        page = page_bytes()
        num_rows = max(len(group.layers) for group in groups)
        size = page * num_rows * num_blocks
        self.config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_groups=[
                KVCacheGroupSpec(list(g.layers), g.spec()) for g in groups
            ],
            kv_cache_tensors=[
                KVCacheTensor(
                    size=size,
                    layers=list(group.layers),
                    layer_stride=page * num_blocks,
                    block_stride=page,
                )
                for group in groups
            ],
        )
        backing = torch.zeros(size // _WORD_BYTES, dtype=torch.int64)
        rows = backing.view(num_rows, num_blocks, 2, BLOCK_TOKENS)
        self.caches, self._views = {}, []
        for group in groups:
            views = []
            for row, layer in enumerate(group.layers):
                pages = rows[row][:, : group.planes]
                self.caches[layer] = pages.view(torch.float32)
                views.append(pages.numpy())
            self._views.append(views)
        self._hashes = {}
        self.num_mismatches = 0
        self.faults = []

    def forward(self, req_id, tokens, start, num_new, block_ids):
        """Run one request's tokens ``start`` to ``start + num_new``; the next token.

        ``block_ids``: one list per group. What the group attends to is read back
        and checked, new positions included.
        """
        end = start + num_new
        true = self._hash(req_id, tokens[:end])
        read = None
        for group, views, blocks in zip(
            self.groups, self._views, block_ids, strict=True
        ):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            at = np.arange(first, end)
            block = np.asarray(blocks)[at // BLOCK_TOKENS]
            place = at % BLOCK_TOKENS
            new = start - first
            for number, view in enumerate(views, start=1):
                for plane in range(group.planes):
                    want = true[first:] * number ^ -plane ^ self._of_rank
                    view[block[new:], plane, place[new:]] = want[new:]
                    got = view[block, plane, place]
                    if not np.array_equal(got, want):
                        where = at[got != want]
                        self._fault(req_id, group.layers[number - 1], where, block)
                    read = got if read is None else read
        return next_token(read)

    def _hash(self, req_id, tokens):
        known = self._hashes.setdefault(req_id, [])
        while len(known) < len(tokens):
            known.append(next_hash(known[-1] if known else None, tokens[len(known)]))
        return np.array(known[: len(tokens)], dtype=np.int64)

    def _fault(self, req_id, layer, where, block):
        self.num_mismatches += 1
        if len(self.faults) < 10:
            self.faults.append(
                f"{req_id} layer {layer} positions {where[0]}..{where[-1]} "
                f"({len(where)} of {len(block)})"
            )
