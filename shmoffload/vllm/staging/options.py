"""The options of a ``ShmTier`` as the configuration of an engine of its own.

Covers: the keys of the tier's entry in vLLM's ``secondary_tiers``.
Does not cover: vLLM's own keys of that entry (``type``, ``module_path``,
``backpressure``), which vLLM takes out; keys that it shares with the tiers of
``ShmOffloadingSpec`` (``setup.tiers``).
Who calls it: ``tier``, once, at start. Does not import vllm.

Of its own it has:

* ``tier``: what keeps the blocks: slab, fs, memory or a plug-in's name.
* ``staging_bytes``: memory between vLLM's primary and the tier, 256MiB by default.
* ``session``, ``namespace``, ``revision``, ``limits``: as in ``setup.settings``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from shmoffload.errors import ConfigError, shown
from shmoffload.vllm.setup.namespace import namespace_text
from shmoffload.vllm.setup.tiers import read_tiers
from shmoffload.wire.config import Config, TierConfig, closest, from_dict
from shmoffload.wire.layout import stride_of
from shmoffload.wire.sizes import format_size, parse_size

DEFAULT_STAGING: Final = "256MiB"
_OWN_KEYS: Final = (
    "tier",
    "staging_bytes",
    "session",
    "namespace",
    "revision",
    "limits",
)
_TIER_KEYS: Final = (
    "root_dir",
    "n_read_threads",
    "n_write_threads",
    *(key for key in TierConfig.__struct_fields__ if key != "type"),
)
_ROWS: Final = "rows of vLLM's primary"
"""Part of the namespace: another order of bytes in a block than ours."""


def read_options(
    options: Mapping[str, Any],
    vllm_config: Any,  # noqa: ANN401
    *,
    row_bytes: int,
    is_replicated: bool,
    engine: str = "",
) -> tuple[Config, list[str]]:
    """Return the configuration, and sentences for the log.

    Args:
        options: the entry of ``secondary_tiers``, without vLLM's own keys.
        vllm_config: vLLM's OffloadingConfig; only its attributes are looked at.
        row_bytes: bytes of a row of vLLM's primary; a block of ours is one row.
        is_replicated: a row is one copy for all ranks.
        engine: which vLLM lays out the bytes, as for ``setup.settings``.

    Raises:
        ConfigError: unknown key or bad value; a sentence says which.
    """
    if "tier" not in options:
        raise ConfigError(
            'ShmTier does not know where to keep blocks: add "tier": "slab" and '
            '"path": "/some/dir"'
        )
    known = (*_OWN_KEYS, *_TIER_KEYS)
    for key in options:
        if key not in known:
            raise ConfigError(
                f"ShmTier has no option {key}: "
                f"{closest(key, known, 'did you mean {}?', 'known are {}')}"
            )
    tier = {key: value for key, value in options.items() if key not in _OWN_KEYS}
    tier["type"] = options["tier"]
    parallel = vllm_config.parallel
    replica = parallel.data_parallel_index
    tiers, _, notes = read_tiers([tier], replica=replica, has_events=False)
    namespace, more = namespace_text(
        vllm_config,
        is_replicated=is_replicated,
        # A canonical row has another order; one of another topology stays a miss.
        engine=f"{engine} {_ROWS} canonical={bool(vllm_config.canonical_layout)}",
        own=_text(options, "namespace"),
        revision=_text(options, "revision"),
    )
    num_slots = _num_slots(options, row_bytes)
    name = _session_name(options, tiers[0], vllm_config)
    config = from_dict(
        {
            "session": {"name": name, "namespace": namespace},
            "primary": {
                "block_bytes": row_bytes,
                "slots": num_slots,
                "policy": "lru",
                "accept_prefix": True,
            },
            "tier": tiers,
            "limits": _limits(options, num_slots * stride_of(row_bytes)),
        }
    )
    return config, [*notes, *more]


def _limits(options: Mapping[str, Any], staging_bytes: int) -> dict[str, Any]:
    limits = options.get("limits") or {}
    if not isinstance(limits, Mapping):
        raise ConfigError(
            f"ShmTier: limits = {shown(limits)} is not a mapping: write "
            f'{{"job_deadline_s": 30}}'
        )
    if "credit_bytes" in limits:
        raise ConfigError(
            "ShmTier: limits.credit_bytes is half of the staging: remove it, and set "
            "staging_bytes"
        )
    if "prefill_s_per_block" in limits:
        raise ConfigError(
            "ShmTier: limits.prefill_s_per_block has no meaning here, where vLLM "
            "decides what is loaded: remove it"
        )
    # Stores may fill half of the staging, so that loads find room in the other.
    return {**limits, "credit_bytes": staging_bytes // 2}


def _num_slots(options: Mapping[str, Any], row_bytes: int) -> int:
    stride = stride_of(row_bytes)
    given = options.get("staging_bytes", DEFAULT_STAGING)
    num_bytes = parse_size(given, key="ShmTier: staging_bytes")
    if num_bytes < 2 * stride:
        raise ConfigError(
            f"ShmTier: staging_bytes = {num_bytes} is too small: a block of this model "
            f"takes {stride} bytes there, and two have to fit: give at least "
            f"{format_size(2 * stride)}"
        )
    return num_bytes // stride


def _session_name(
    options: Mapping[str, Any],
    tier: Mapping[str, Any],
    vllm_config: Any,  # noqa: ANN401
) -> str:
    """Return a name that no other tier of this or another server has.

    The place is in it because a server may have several such tiers.
    """
    own = _text(options, "session")
    replica = vllm_config.parallel.data_parallel_index
    if own:
        return f"{own}-dp{replica}" if replica else own
    what = f"{vllm_config.engine_id}\0{tier['type']}\0{tier.get('path', '')}"
    return f"shmtier-{hashlib.sha256(what.encode()).hexdigest()[:12]}"


def _text(options: Mapping[str, Any], key: str) -> str:
    value = options.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConfigError(
            f'ShmTier: {key} = {shown(value)} is not text: write "{key}": "..."'
        )
    return value
