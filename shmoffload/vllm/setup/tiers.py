"""vLLM's ``secondary_tiers`` -> our tiers.

Covers: keys of vLLM's fs tier and of ours, types of vLLM that we do not serve, names,
directories of replicas, the label that vLLM's metrics give a tier.
Does not cover: values that ``wire.config`` checks for every front end.
Who calls it: ``settings``, at start; metric definitions; any thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from shmoffload.errors import ConfigError, cut, shown
from shmoffload.wire.config import closest
from shmoffload.worker.registry import needs_path, tier_types

MAX_LOAD_THREADS: Final = 8
_BUILT_IN: Final = ("fs", "memory", "slab")

_SAME: Final = (
    *("name", "max_bytes", "min_free", "policy", "admit", "threads", "nice"),
    "key_file",
)
_KNOWN: Final = (
    *_SAME,
    "type",
    "path",
    "root_dir",
    "medium",
    "locality",
    "n_read_threads",
    "n_write_threads",
    "enable_kv_events",
    "backpressure",
)
_NEAREST: Final = {
    "obj": 'object stores are not served here; the nearest is {"type": "fs", '
    '"root_dir": ...} in a directory where the bucket is mounted',
    "p2p": 'blocks are not fetched from other servers here; the nearest is {"type": '
    '"slab", "root_dir": ...}, which keeps this server\'s own blocks on a local disk',
    "kvcr": 'KVCR is not served here; the nearest is {"type": "slab", "root_dir": '
    "...}, which keeps blocks on a local disk",
    "example": 'that is vLLM\'s example; the nearest is {"type": "memory"}, which '
    "keeps blocks in the memory of one process, for tests",
}


def read_tiers(
    raw: object, *, replica: int, has_events: bool
) -> tuple[list[dict[str, Any]], tuple[bool, ...], list[str]]:
    """Return tiers for ``wire.config``, which of them announce blocks, and notes.

    Args:
        raw: value of ``secondary_tiers``.
        replica: data-parallel index. A tier has its directory alone, so replicas
            after the first get a directory each, beneath it.
        has_events: whether the server publishes KV events at all.

    Raises:
        ConfigError: a type or key that we do not serve.
    """
    if not isinstance(raw, list | tuple):
        raise ConfigError(
            f"secondary_tiers = {shown(raw)} is not a list: write a list of "
            f'{{"type": "slab", "root_dir": "/some/dir"}}'
        )
    read = [
        _read_tier(tier, f"secondary_tiers[{idx}]", replica)
        for idx, tier in enumerate(raw)
    ]
    tiers, notes = (
        [tier for tier, _ in read],
        [note for _, each in read for note in each],
    )
    _name_twins(tiers)
    wants_events = [bool(tier.get("enable_kv_events", False)) for tier in raw]
    if any(wants_events) and not has_events:
        notes.append(
            "enable_kv_events of a tier has no effect: the server publishes no KV "
            "events; start it with --kv-events-config"
        )
    return tiers, tuple(has_events and wants for wants in wants_events), notes


def _read_tier(raw: object, at: str, replica: int) -> tuple[dict[str, Any], list[str]]:
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"{at} = {shown(raw)} is not a tier: write "
            f'{{"type": "slab", "root_dir": "/some/dir"}}'
        )
    kind = _type_of(raw, at)
    for key in raw:
        if key not in _KNOWN:
            raise ConfigError(
                f"{at} ({kind}): unknown key {cut(str(key))}: "
                f"{closest(str(key), _KNOWN, 'did you mean {}?', 'known are {}')}"
            )
    tier = {key: raw[key] for key in _SAME if raw.get(key) is not None} | {"type": kind}
    for key in ("medium", "locality"):
        if raw.get(key) is not None:
            tier[key] = str(raw[key]).upper()
    path = _path_of(raw, kind, at, replica)
    if path is not None:
        tier["path"] = path
    wants_events = raw.get("enable_kv_events")
    if wants_events is not None and not isinstance(wants_events, bool):
        raise ConfigError(
            f"{at} ({kind}): enable_kv_events = {shown(wants_events)} is neither true "
            f"nor false: write it without quotes"
        )
    notes = _read_threads(raw, tier, f"{at} ({kind})")
    if raw.get("backpressure") is not None:
        notes.append(
            f"{at} ({kind}): backpressure has no meaning here; bytes in flight are "
            f"bounded by shmoffload.limits.credit_bytes"
        )
    return tier, notes


def _type_of(raw: Mapping[str, Any], at: str) -> str:
    """Return the tier's type, or refuse one that we do not serve."""
    kind = raw.get("type")
    if not isinstance(kind, str) or not kind:
        raise ConfigError(
            f'{at} has no type: add "type": "slab", or one of {", ".join(tier_types())}'
        )
    if raw.get("module_path") is not None:
        raise ConfigError(
            f"{at} ({kind}): a tier class of vLLM (module_path) cannot run in a "
            f"process of its own: remove module_path, and take one of "
            f"{', '.join(tier_types())}"
        )
    if kind not in _BUILT_IN and kind not in (known := tier_types()):
        why = _NEAREST.get(kind) or closest(
            kind, known, "did you mean {}?", "known are {}"
        )
        raise ConfigError(f'{at}: there is no tier type "{cut(kind)}": {why}')
    return kind


def _path_of(raw: Mapping[str, Any], kind: str, at: str, replica: int) -> str | None:
    given = [key for key in ("root_dir", "path") if raw.get(key) is not None]
    if len(given) == 2:
        raise ConfigError(
            f"{at} ({kind}) has root_dir and path: they mean the same, give one"
        )
    if not given:
        if needs_path(kind):
            raise ConfigError(
                f'{at}: a {kind} tier needs a directory: add "root_dir": "/some/dir"'
            )
        return None
    path = raw[given[0]]
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f"{at} ({kind}): {given[0]} = {shown(path)} is no directory: "
            f"write its path as text"
        )
    return path if replica == 0 else os.path.join(path, f"dp{replica}")


def _read_threads(raw: Mapping[str, Any], tier: dict[str, Any], at: str) -> list[str]:
    """Take vLLM's names for the numbers of threads; returns notes."""
    notes = []
    wanted = raw.get("n_read_threads")
    if wanted is not None:
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
            raise ConfigError(
                f"{at}: n_read_threads = {shown(wanted)} is no number of threads: "
                f"give 1 to {MAX_LOAD_THREADS}"
            )
        if "threads" in tier:
            raise ConfigError(
                f"{at} has threads and n_read_threads: they mean the same, give one"
            )
        tier["threads"] = min(wanted, MAX_LOAD_THREADS)
        if wanted > MAX_LOAD_THREADS:
            notes.append(
                f"{at}: n_read_threads = {shown(wanted)}: a tier's process has at most "
                f"{MAX_LOAD_THREADS} load threads, so it gets {MAX_LOAD_THREADS}"
            )
    if raw.get("n_write_threads") is not None:
        notes.append(
            f"{at}: n_write_threads has no meaning here; a tier's process writes with "
            f"one thread"
        )
    return notes


def _name_twins(tiers: list[dict[str, Any]]) -> None:
    """Name nameless tiers of one type by their number: vLLM lets there be two."""
    kinds = [tier["type"] for tier in tiers]
    for number, tier in enumerate(tiers, start=1):
        if "name" not in tier and kinds.count(tier["type"]) > 1:
            tier["name"] = f"{tier['type']}{number}"
