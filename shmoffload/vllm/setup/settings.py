"""vLLM's configuration -> ours: every key is known, refused, or noted.

Covers: ``kv_connector_extra_config`` of vLLM's own CPU and tiering specs, our keys,
geometry of a slot, the session's name, set-ups that we refuse.
Does not cover: secondary tiers (``tiers``); which bytes are alike
(``namespace``); ``offload_prompt_only``, ``self_describing_kv_events`` and
``sync_load_budget_bytes``, which vLLM itself reads.
Who calls it: ``spec``, in the scheduler and in every GPU worker of one server, which
must all come to the same answer (but for ``rank``). Reads files of the model.

A configuration of vLLM's TieringOffloadingSpec runs when two keys are changed::

    {"spec_name": "ShmOffloadingSpec", "spec_module_path": "shmoffload.vllm.spec",
     "cpu_bytes_to_use": 17179869184, "eviction_policy": "auto",
     "secondary_tiers": [{"type": "slab", "root_dir": "/var/cache/kv",
                          "max_bytes": "200GiB"}],
     "shmoffload": {"session": "llm0", "revision": "2026-11-01",
                    "limits": {"credit_bytes": "1GiB"}}}

What vLLM has no word for is in the one mapping ``shmoffload``, all of it optional:

* ``session``: name of our names in /dev/shm; else made from vLLM's engine id.
* ``namespace``: text of yours that keeps blocks apart.
* ``revision``: of the model, where its files do not tell (see ``namespace``).
* ``primary``: ``{"accept_prefix": true}``.
* ``limits``: as in docs/configuration.md; here ``prefill_tokens_per_s`` in place of
  ``prefill_s_per_block``.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from shmoffload.errors import ConfigError, cut, shown
from shmoffload.vllm.setup import geometry
from shmoffload.vllm.setup.namespace import namespace_text
from shmoffload.vllm.setup.tiers import read_tiers
from shmoffload.wire import config as wire_config
from shmoffload.wire.config import BUILT_IN_POLICIES, POLICY_GROUP, Config, closest
from shmoffload.wire.layout import stride_of
from shmoffload.wire.sizes import format_size, parse_size

_CREDIT_BYTES: Final = 256 << 20
_START_TIMEOUT_S: Final = 120.0
"""A server's start keeps every core busy, and workers are nice: more than our 30 s."""
_SESSION: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,30}")

_VLLM_KEYS: Final = (
    "spec_name",
    "spec_module_path",
    "cpu_bytes_to_use",
    "block_size",
    "blocks_per_chunk",
    "eviction_policy",
    "cache_policy_module_path",
    "store_threshold",
    "max_tracker_size",
    "offload_prompt_only",
    "secondary_tiers",
    "self_describing_kv_events",
    "canonical_layout",
    "backpressure",
    "sync_load_budget_bytes",
    "tier_poll_interval_s",
)
_KNOWN: Final = (*_VLLM_KEYS, "shmoffload")
_OUR_KEYS: Final = ("session", "namespace", "revision", "limits", "primary")
_WITHOUT_MEANING: Final = {
    "backpressure": "bytes in flight are bounded by shmoffload.limits.credit_bytes",
    "tier_poll_interval_s": "replies of a tier are collected when a word in memory "
    "has moved, without a thread",
    "canonical_layout": "every rank keeps its own part of a block, and another "
    "parallel layout is another namespace",
}
_THEIR_WORDS: Final = {
    "primary.policy": "eviction_policy",
    "primary.bytes or primary.slots": "cpu_bytes_to_use",
    "primary.slots or primary.bytes": "cpu_bytes_to_use",
    "primary.bytes": "cpu_bytes_to_use",
    "primary.slots": "cpu_bytes_to_use",
    "primary.store_threshold": "store_threshold",
    "primary.max_tracker_size": "max_tracker_size",
    "$.limits.": "shmoffload.limits.",
    "limits.": "shmoffload.limits.",
    "shmoffload.shmoffload.": "shmoffload.",
    "session.name": "shmoffload.session",
    "$.tier[": "secondary_tiers[",
    "[[tier]]": "tier of secondary_tiers",
}
_ELSEWHERE: Final = {
    "policy": "eviction_policy",
    "bytes": "cpu_bytes_to_use",
    "slots": "cpu_bytes_to_use",
    "block_bytes": "blocks_per_chunk",
    "store_threshold": "store_threshold",
    "max_tracker_size": "max_tracker_size",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What one process of a server needs to know of its configuration.

    Attributes:
        config: ours, checked; the same in every process of the server.
        num_ranks: GPU workers of this engine.
        rank: of this process; 0 in the scheduler.
        is_replicated: one copy serves all ranks: rank 0 stores, all load.
        part_bytes: one rank's part of a slot.
        blocks_per_chunk: GPU blocks in one of our blocks.
        has_events: whether KV events are published.
        tier_events: of each secondary tier, whether its blocks are announced too.
        notes: sentences to be logged once, when the scheduler starts.
        may_have_window: some KV group may have a sliding window.
    """

    config: Config
    num_ranks: int
    rank: int
    is_replicated: bool
    part_bytes: int
    blocks_per_chunk: int
    has_events: bool
    tier_events: tuple[bool, ...]
    notes: tuple[str, ...]
    may_have_window: bool = True

    @property
    def part_offset(self) -> int:
        """Where this rank's part begins in a slot: parts lie in order of rank."""
        return 0 if self.is_replicated else self.rank * self.part_bytes


def read_settings(config: Any, *, engine: str = "") -> Settings:  # noqa: ANN401
    """Translate vLLM's ``OffloadingConfig``; only its attributes are looked at.

    Args:
        config: vLLM's OffloadingConfig, 0.32 or 0.33.
        engine: which vLLM lays out the bytes, e.g. ``"0.32 cpu"``.

    Raises:
        ConfigError: a key or value cannot be used.
        BadInputError: this set-up of the server cannot be served.
    """
    extra, parallel = config.extra_config, config.parallel
    _refuse_unknown(extra, _KNOWN, "")
    ours = _our_keys(extra)
    geometry.refuse_holes(config)
    is_replicated = bool(config.replicated_layout) and not config.canonical_layout
    part_bytes = geometry.part_bytes_of(config)
    block_bytes = part_bytes * (1 if is_replicated else parallel.world_size)
    geometry.refuse_large_blocks(config, block_bytes)
    notes = [
        f"{key} has no meaning here: {why}"
        for key, why in _WITHOUT_MEANING.items()
        if extra.get(key)
    ]
    primary = {
        "block_bytes": block_bytes,
        "bytes": _primary_bytes(extra, block_bytes),
        "policy": _policy(extra, notes),
        **_numbers(extra, "store_threshold", "max_tracker_size"),
        **_section(ours, "primary"),
    }
    tiers, tier_events, tier_notes = read_tiers(
        () if extra.get("secondary_tiers") is None else extra["secondary_tiers"],
        replica=parallel.data_parallel_index,
        has_events=bool(config.enable_kv_cache_events),
    )
    namespace, namespace_notes = namespace_text(
        config,
        is_replicated=is_replicated,
        engine=engine,
        own=_text(ours, "namespace"),
        revision=_text(ours, "revision"),
    )
    return Settings(
        config=_checked(
            {
                "session": {
                    "name": _session_name(config, _text(ours, "session")),
                    "namespace": namespace,
                },
                "primary": primary,
                "tier": tiers,
                "limits": _limits(ours, config, block_bytes),
            }
        ),
        num_ranks=parallel.world_size,
        rank=parallel.rank,
        is_replicated=is_replicated,
        part_bytes=part_bytes,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        has_events=bool(config.enable_kv_cache_events),
        tier_events=tier_events,
        notes=(*notes, *tier_notes, *namespace_notes),
        may_have_window=geometry.may_have_window(config),
    )


def _primary_bytes(extra: Mapping[str, Any], block_bytes: int) -> int:
    value = extra.get("cpu_bytes_to_use")
    if value is None:
        raise ConfigError(
            "cpu_bytes_to_use is missing: add the bytes of host memory to use, for "
            'all GPUs of this engine together, e.g. "cpu_bytes_to_use": 17179869184'
        )
    if isinstance(value, float) and math.isfinite(value):
        value = int(value)  # --kv-offloading-size gives a float
    num_bytes = parse_size(value, key="cpu_bytes_to_use")
    stride = stride_of(block_bytes)
    if num_bytes < stride:
        raise ConfigError(
            f"cpu_bytes_to_use = {num_bytes} holds no block: one takes {stride} bytes "
            f"({format_size(stride)}, its header page included): raise it"
        )
    return num_bytes


def _policy(extra: Mapping[str, Any], notes: list[str]) -> str:
    """Return the eviction policy; one of vLLM's own classes becomes our default."""
    policy = extra.get("eviction_policy")
    if policy is None:
        policy = "auto"
    if not isinstance(policy, str):
        raise ConfigError(
            f"eviction_policy = {shown(policy)} is not a name: take one of "
            f"{', '.join(BUILT_IN_POLICIES)}"
        )
    if extra.get("cache_policy_module_path"):
        is_ours = policy in BUILT_IN_POLICIES or policy in _plugged_in()
        notes.append(
            f"cache_policy_module_path has no meaning here: policies of vLLM do not "
            f'fit, "{policy if is_ours else "auto"}" is used; a policy of yours '
            f"registers the entry point {POLICY_GROUP}"
        )
        return policy if is_ours else "auto"
    return policy


def _plugged_in() -> frozenset[str]:
    # Here and not above: 20-30 ms that a built-in policy does not pay.
    from importlib.metadata import entry_points

    return frozenset(entry_points(group=POLICY_GROUP).names)


def _numbers(extra: Mapping[str, Any], *keys: str) -> dict[str, int]:
    """Return those of ``keys`` that are given, as whole numbers."""
    found = {}
    for key in keys:
        value = extra.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(
                f"{key} = {shown(value)} is no count: give a whole number >= 0"
            )
        found[key] = value
    return found


def _session_name(config: Any, own: str) -> str:  # noqa: ANN401
    """Name the session: alike in all processes of an engine, unlike in two engines."""
    parallel = config.parallel
    if own:
        replica = parallel.data_parallel_index
        is_one_of_many = parallel.data_parallel_size > 1 or replica > 0
        name = f"{own}-dp{replica}" if is_one_of_many else own
        if not _SESSION.fullmatch(name):
            raise ConfigError(
                f'shmoffload.session = "{cut(own)}" is not usable: take 1 to '
                f"{31 - len(name) + len(own)} of a-z 0-9 _ -, beginning with a letter "
                f"or digit"
            )
        return name
    # vLLM has appended the replica to its engine id already.
    engine_id = str(config.engine_id)
    if _SESSION.fullmatch(engine_id):
        return engine_id
    return f"vllm-{hashlib.sha256(engine_id.encode()).hexdigest()[:12]}"


def _our_keys(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    ours = extra.get("shmoffload")
    if ours is None:
        return {}
    if not isinstance(ours, Mapping):
        raise ConfigError(
            f"shmoffload = {shown(ours)} is not a mapping: write "
            f'"shmoffload": {{"session": "llm0"}}'
        )
    _refuse_unknown(ours, _OUR_KEYS, "shmoffload.")
    return ours


def _section(ours: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return ``shmoffload.primary`` or ``shmoffload.limits``; may be empty."""
    section = ours.get(name)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"shmoffload.{name} = {shown(section)} is not a mapping")
    if name == "primary":
        for key in section:
            if key in _ELSEWHERE:
                raise ConfigError(
                    f"shmoffload.primary.{key} has its place in vLLM's own keys: give "
                    f"{_ELSEWHERE[key]} beside shmoffload"
                )
        _refuse_unknown(section, ("accept_prefix",), "shmoffload.primary.")
    return dict(section)


def _limits(
    ours: Mapping[str, Any],
    config: Any,  # noqa: ANN401
    block_bytes: int,
) -> dict[str, Any]:
    limits = _section(ours, "limits")
    # A block may be larger than our default for bytes in flight.
    limits.setdefault("credit_bytes", max(_CREDIT_BYTES, 4 * stride_of(block_bytes)))
    limits.setdefault("start_timeout_s", _START_TIMEOUT_S)
    if "prefill_s_per_block" in limits:
        raise ConfigError(
            "shmoffload.limits.prefill_s_per_block follows from the block size here: "
            "give prefill_tokens_per_s in its place, the tokens that the server "
            "computes in a second of prefill"
        )
    rate = limits.pop("prefill_tokens_per_s", 0)
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise ConfigError(
            f"shmoffload.limits.prefill_tokens_per_s = {shown(rate)} is not a number: "
            f"give the tokens that the server computes in a second of prefill, or 0"
        )
    if not 0 <= rate < math.inf:
        raise ConfigError(
            f"shmoffload.limits.prefill_tokens_per_s = {rate} is not usable: give a "
            f"number above 0, or 0 to load whatever a tier has"
        )
    if rate:
        limits["prefill_s_per_block"] = geometry.tokens_per_key(config) / rate
    return limits


def _text(ours: Mapping[str, Any], key: str) -> str:
    value = ours.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConfigError(
            f'shmoffload.{key} = {shown(value)} is not text: write "{key}": "..."'
        )
    return value


def _refuse_unknown(raw: Mapping[str, Any], known: tuple[str, ...], at: str) -> None:
    for key in raw:
        if key not in known:
            raise ConfigError(
                f"unknown key {at}{cut(str(key))} in kv_connector_extra_config: "
                f"{closest(str(key), known, 'did you mean {}?', 'known are {}')}"
            )


def _checked(raw: dict[str, Any]) -> Config:
    """Check the translated configuration, with vLLM's names in the sentences."""
    try:
        return wire_config.from_dict(raw)
    except ConfigError as error:
        raise ConfigError(in_vllm_words(str(error))) from error


def in_vllm_words(sentence: str) -> str:
    """Name the keys of a refusal as one types them under vLLM."""
    for word, theirs in _THEIR_WORDS.items():
        sentence = sentence.replace(word, theirs)
    return sentence
