"""Prompts for the server tests, and counting what an answer came from.

Covers: repeatable prompts, asking one after another or at once and comparing with
the server without offloading, counters that have to change by exact numbers, CPU.
Does not cover: processes (``server_kit``).
Who calls it: ``tests/with_vllm/test_server_*.py``.
"""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from model import VOCAB_SIZE
from server_kit import BLOCK_BYTES, BLOCK_TOKENS, SETTLE_TIMEOUT_S, SOURCES

from shmoffload.testing.poll import wait_until

LENGTHS = (200, 333, 64, 700)
BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
STORE_BYTES = "vllm:kv_offload_store_bytes_total"
LOAD_BYTES = "vllm:kv_offload_load_bytes_total"
PREEMPTIONS = "vllm:num_preemptions_total"
HEADER_BYTES = 4096
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def make_prompt(name, num_tokens):
    """Token ids that depend on name and length only."""
    rng = random.Random(f"{name}/{num_tokens}")
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def make_prompts(name):
    """Four prompts of the usual lengths: 39 GPU blocks in all."""
    return [make_prompt(f"{name}{i}", length) for i, length in enumerate(LENGTHS)]


def num_blocks(prompts, *, per_block=1):
    """Whole blocks of some prompts when a block holds ``per_block`` GPU blocks."""
    return sum(len(prompt) // (BLOCK_TOKENS * per_block) for prompt in prompts)


def ask(server, reference, prompts, *, max_tokens=24, **more):
    """Ask one after another; every token must be the reference's.

    Returns:
        Cached prompt tokens of each answer, as the API reports them.
    """
    cached = []
    for prompt in prompts:
        expected = reference.tokens(prompt, max_tokens=max_tokens)
        answer = server.complete(prompt, max_tokens=max_tokens, **more)
        _compare(prompt, answer, expected, server)
        cached.append(answer.num_cached)
    return cached


def ask_at_once(server, reference, prompts, *, max_tokens=24, meanwhile=None):
    """Ask all at once, eight at a time, and compare as ``ask`` does.

    Args:
        meanwhile: called in this thread once the first answer is here.
    """
    expected = [reference.tokens(prompt, max_tokens=max_tokens) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(server.complete, prompt, max_tokens=max_tokens)
            for prompt in prompts
        ]
        if meanwhile is not None:
            futures[0].result()
            meanwhile()
        answers = [future.result() for future in futures]
    for prompt, answer, tokens in zip(prompts, answers, expected, strict=True):
        _compare(prompt, answer, tokens, server)
    return sum(answer.num_cached for answer in answers)


def _compare(prompt, answer, expected, server):
    same = sum(a == b for a, b in zip(answer.tokens, expected, strict=True))
    assert answer.tokens == expected, (
        f"{len(prompt)} prompt tokens, {answer.num_cached} cached: only {same} of "
        f"{len(expected)} tokens are right\n{server.last_lines()}"
    )


class Change:
    """How far counters of ``/metrics`` have moved since this was made."""

    def __init__(self, server):
        self._server = server
        self._before = server.metrics()

    def of(self, name, **labels):
        """The change until now."""
        try:
            before = self._before.value(name, **labels)
        except KeyError:  # some counters appear with their first value
            before = 0.0
        try:
            return self._server.metrics().value(name, **labels) - before
        except KeyError:
            return 0.0

    def expect(self, name, expected, **labels):
        """Wait for the counter, which trails the answer; it must stop exactly there."""
        wait_until(
            lambda: self.of(name, **labels) >= expected,
            timeout_s=SETTLE_TIMEOUT_S,
            what=f"{name}{labels} to grow by {expected}",
        )
        found = self.of(name, **labels)
        assert found == expected, (
            f"{name}{labels} grew by {found:g}, not {expected}\n"
            f"{self._server.last_lines()}"
        )

    def expect_cached(self, **tokens):
        """Cached prompt tokens of every source since then; what is not named: none."""
        assert tokens.keys() <= set(SOURCES)
        for source in SOURCES:
            self.expect(BY_SOURCE, tokens.get(source, 0), source=source)
        external = sum(n for source, n in tokens.items() if source != "device")
        self.expect(EXTERNAL_HITS, external)


def slab(folder, **more):
    return {"type": "slab", "path": str(folder / "slab"), "max_bytes": "64MiB", **more}


def fs(folder, **more):
    return {"type": "fs", "root_dir": str(folder / "fs"), "max_bytes": "64MiB", **more}


def cached(prompts, *, per_block):
    """Tokens of each prompt that whole blocks cover."""
    whole = BLOCK_TOKENS * per_block
    return [len(prompt) // whole * whole for prompt in prompts]


def first_host_disk(server, reference, prompts, *, per_block):
    """The three phases of ``test_server_phases`` for a block of several GPU blocks."""
    blocks = num_blocks(prompts, per_block=per_block)
    expected = cached(prompts, per_block=per_block)
    change = Change(server)
    assert ask(server, reference, prompts) == [0] * len(prompts)
    change.expect(STORE_BYTES, blocks * per_block * BLOCK_BYTES)
    change.expect_cached()
    server.wait_tier("slab", "blocks_written", blocks)
    for external, source in ((False, "host"), (True, "disk")):
        server.reset(external=external)
        change, before = Change(server), server.tier("slab")
        assert ask(server, reference, prompts) == expected
        change.expect_cached(**{source: sum(expected)})
        num_read = server.tier("slab")["blocks_read"] - before["blocks_read"]
        assert num_read == (blocks if external else 0)


def cpu_s(pids):
    """CPU seconds, user and system, that processes have used so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS_PER_S


def cpu_share(pids, *, window_s):
    """Cores that processes keep busy over a while, of which this call takes all."""
    began_s, before = time.monotonic(), cpu_s(pids)
    wait_until(
        lambda: time.monotonic() - began_s >= window_s,
        timeout_s=window_s + 5,
        what="the window to pass",
    )
    return (cpu_s(pids) - before) / (time.monotonic() - began_s)
