"""The namespace: one text of everything that changes the bytes of a block.

Covers: parallel layout, KV layout, groups, hash seed, engine, words of the operator.
Does not cover: what the model's weights are (``model_identity``).
Who calls it: ``settings``, in every process of a server; the text must be the same in
all of them, so neither rank, engine id nor replica is in it, nor any path or time: a
restarted server, another replica and another node find the blocks again.

Another text means a miss, never other bytes: a cache that two GPUs wrote is not read
by one. What vLLM does not tell a spec (``--hf-overrides``, ``--quantization`` at load
time, ``--max-model-len`` where it picks LongRoPE's factors, ``--mamba-cache-dtype``, an
adapter trained anew under an old name) is the operator's to tell, by
``shmoffload.revision``. A draft model's weights are not in it either: its wrong blocks
would cost speed, not tokens.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, Final

from shmoffload.vllm.setup.model_identity import model_identity

FORMAT_VERSION: Final = 1
"""Raise it when the place of a byte in a block changes."""


def namespace_text(
    config: Any,  # noqa: ANN401
    *,
    is_replicated: bool,
    engine: str = "",
    own: str = "",
    revision: str = "",
) -> tuple[str, list[str]]:
    """Return the namespace and sentences for the log.

    Args:
        config: vLLM's OffloadingConfig; only its attributes are looked at.
        is_replicated: one copy of a block for all ranks.
        engine: which vLLM lays out the bytes.
        own: the operator's text.
        revision: the operator's revision of the model.

    Raises:
        ConfigError: several revisions of the model are there, and none is named.
    """
    identity, notes = model_identity(config.model.name, revision)
    parallel, cache = config.parallel, config.cache
    parts: dict[str, object] = {
        "format": FORMAT_VERSION,
        "model": identity,
        "revision": revision,
        "own": own,
        "engine": engine,
        "dtype": config.model.dtype,
        "layout": config.kv_cache_layout,
        "hash_tokens": cache.tokens_per_hash,
        "blocks": cache.blocks_per_chunk,
        "worker_bytes": config.worker_kv_bytes_per_block,
        "tp": parallel.tp_size,
        "pp": parallel.pp_size,
        "pcp": parallel.pcp_size,
        "dcp": parallel.dcp_size,
        "world": parallel.world_size,
        "replicated": int(is_replicated),
        "seed": os.environ.get("PYTHONHASHSEED"),
        "groups": _groups(config),
    }
    if parallel.pp_size > 1:
        # Which stage has which layers, where it is not vLLM's own choice.
        parts["stages"] = os.environ.get("VLLM_PP_LAYER_PARTITION")
    # repr keeps parts apart: no text of one can look like the beginning of another.
    return " ".join(f"{name}={value!r}" for name, value in parts.items()), notes


def _groups(config: Any) -> str:  # noqa: ANN401
    """Return groups as ``id:tokens:layers:digest``, joined by commas."""
    return ",".join(
        f"{group.group_id}:{group.tokens_per_block}:{_layers(group, config)}"
        for group in config.groups
    )


def _layers(group: Any, config: Any) -> str:  # noqa: ANN401
    if config.parallel.pp_size > 1:
        # Each stage sees its own layers only, and all must say the same: the model
        # and the number of stages say which they are.
        return "by-stage"
    names = "\0".join(group.layer_names)
    return f"{len(group.layer_names)}:{hashlib.sha256(names.encode()).hexdigest()[:16]}"
