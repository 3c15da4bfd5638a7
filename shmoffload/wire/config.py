"""Configuration: TOML text or keywords in, one checked struct out.

Covers: keys, sizes with units, defaults, the closest match of a wrong key.
Does not cover: whether a path works (its tier's worker says) nor whether memory
suffices (``wire.region`` says).
Who calls it: engine, supervisor, workers, command line; any thread.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from shmoffload.core.types import OffloadPolicy, parse_admit
from shmoffload.errors import ConfigError, cut
from shmoffload.wire.layout import namespace_digest, stride_of
from shmoffload.wire.sizes import parse_size

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,30}")
MAX_TIERS: Final = 8
MIN_WAIT_S, MAX_WAIT_S = 0.001, 86400
MAX_PATH_BYTES: Final = 1024
MAX_TRACKED: Final = 10_000_000
BUILT_IN_POLICIES: Final = ("auto", "lru", "arc", "arc2")
POLICY_GROUP: Final = "shmoffload.policies"
"""Entry points of other eviction policies: ``name = "module:factory"``."""


class SessionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[session]``: who we are.

    Attributes:
        name: of the session; names in /dev/shm start with it.
        namespace: everything that changes bytes (model, revision, dtype, KV
            layout, parallel layout, hash seed); a different one means MISS.
    """

    name: str = "default"
    namespace: str = ""


class PrimaryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[primary]``: the host-memory tier that the GPU copies to.

    Give ``slots`` or ``bytes``. ``block_bytes`` is the payload of a block,
    ``policy`` the eviction order: a built-in one or a plug-in's name.
    ``accept_prefix``: store the part of an offer that finds room.
    ``store_threshold``: offers of a block before it is stored; below 2 the first
    is enough. ``max_tracker_size``: blocks whose offers are counted.
    ``persist``: the region outlives everybody, for the next engine of the session.
    ``check_adopted``: that engine takes only blocks whose checksum holds.
    """

    block_bytes: int | str
    slots: int | None = None
    bytes: int | str | None = None
    policy: str = "auto"
    accept_prefix: bool = False
    store_threshold: int = 0
    max_tracker_size: int = 64000
    persist: bool = False
    check_adopted: bool = True


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[[tier]]``: one secondary tier, served by one worker process.

    Attributes:
        type: a registered tier: slab, fs, memory or a plug-in's name.
        name: unique in the session; the type by default.
        path: directory of a disk tier.
        max_bytes: bound of the tier; None = the tier's own default.
        min_free: free bytes of the file system that the tier leaves alone.
        policy: what the tier asks of each request; None = as its code says.
        admit: what it gets at first store: all, second (only what is used again)
            or tail:N (all but a request's last N blocks).
        medium: where it keeps blocks, for ``kv_load_tiers``; None = by its type.
        locality: of that place; None = by its type.
        key_file: file with a key; what the tier keeps is encrypted with it.
        threads: load threads of the worker, 1 to 8.
        nice: niceness of the worker, 0 to 19.
    """

    type: str
    name: str = ""
    path: str | None = None
    max_bytes: int | str | None = None
    min_free: int | str = "256MiB"
    policy: OffloadPolicy | None = None
    admit: str = "all"
    medium: Literal["CPU", "STORAGE"] | None = None
    locality: Literal["LOCAL", "REMOTE"] | None = None
    key_file: str | None = None
    threads: int = 2
    nice: int = 10


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[limits]``: every wait and every queue has a bound; these are they.

    ``job_deadline_s`` is the most that a job may take, ``job_deadline_min_s`` the
    least, whatever was measured. ``prefill_s_per_block``: in which the GPU computes
    a block; 0 = every load is worth while.
    """

    job_deadline_s: float = 30.0
    job_deadline_min_s: float = 10.0  # a silent worker has as long: hung_after_s
    prefill_s_per_block: float = 0.0
    heartbeat_s: float = 1.0
    hung_after_s: float = 10.0
    restart_backoff_s: float = 0.1
    restart_backoff_max_s: float = 30.0
    credit_bytes: int | str = "256MiB"
    outbox_messages: int = 4096
    scan_hold_s: float = 5.0
    max_cascade_share: float = 1.0
    start_timeout_s: float = 30.0
    close_timeout_s: float = 10.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole configuration, checked, with sizes in bytes.

    Build it with ``load``, ``from_toml``, ``from_dict`` or ``decode``; all check.
    """

    primary: PrimaryConfig
    session: SessionConfig = SessionConfig()
    tier: tuple[TierConfig, ...] = ()
    limits: LimitsConfig = LimitsConfig()

    @property
    def block_bytes(self) -> int:
        """Payload bytes of a block."""
        return parse_size(self.primary.block_bytes, key="primary.block_bytes")

    @property
    def stride(self) -> int:
        """Bytes of a slot: payload rounded to a page, and the header page."""
        return stride_of(self.block_bytes)

    @property
    def num_slots(self) -> int:
        """Slots of the primary region."""
        if self.primary.slots is not None:
            return self.primary.slots
        assert self.primary.bytes is not None
        return parse_size(self.primary.bytes, key="primary.bytes") // self.stride

    @property
    def credit_bytes(self) -> int:
        """Bytes that may be in flight to one tier."""
        return parse_size(self.limits.credit_bytes, key="limits.credit_bytes")

    @property
    def namespace_digest(self) -> bytes:
        """Digest in every block header; covers block size and layout as well."""
        return namespace_digest(f"{self.session.namespace}\0{self.block_bytes}")


def load(path: Path | str, *, tiers_only: bool = False) -> Config:
    """Read a TOML file.

    Args:
        path: the file.
        tiers_only: for a daemon, which is told the primary by its engines: the
            file may leave ``[primary]`` out.

    Raises:
        ConfigError: unreadable, no TOML, unknown key or bad value.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): give a TOML file, see "
            f"docs/configuration.md"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: give a TOML file") from error
    return from_toml(text, tiers_only=tiers_only)


def from_toml(text: str, *, tiers_only: bool = False) -> Config:
    """Check TOML text; see ``load``."""
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:  # nested without end
        raise ConfigError(f"the configuration is not TOML: {error}") from error
    if tiers_only:
        raw.setdefault("primary", {"block_bytes": 1, "slots": 1})
    return from_dict(raw)


def from_dict(raw: dict[str, Any]) -> Config:
    """Check a mapping shaped like the TOML file; see ``load``."""
    if isinstance(raw.get("tier"), dict):
        raise ConfigError("[tier] is a list: write [[tier]], with two brackets")
    _refuse_unknown(raw, Config, "")
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the configuration has a wrong value: {error}") from error
    names = [tier.name or tier.type for tier in config.tier]
    config = msgspec.structs.replace(
        config,
        tier=tuple(
            msgspec.structs.replace(tier, name=name)
            for tier, name in zip(config.tier, names, strict=True)
        ),
    )
    _check(config)
    return config


def encode(config: Config) -> bytes:
    """Pack a configuration for another process."""
    return msgspec.json.encode(config)


def decode(data: bytes) -> Config:
    """Unpack and check what ``encode`` packed.

    Raises:
        ConfigError: garbage.
    """
    try:
        return from_dict(msgspec.json.decode(data, type=dict[str, Any]))
    except (msgspec.DecodeError, RecursionError) as error:  # nested without end
        raise ConfigError(f"the packed configuration is garbage: {error}") from error


def _check(config: Config) -> None:
    """Check what types cannot say, one sentence per fault."""
    if not _NAME.fullmatch(config.session.name):
        raise ConfigError(
            f'session.name = "{cut(config.session.name)}" is not usable: take 1 to 31 '
            f"of a-z 0-9 _ -, beginning with a letter or digit"
        )
    if not 1 <= config.block_bytes <= 1 << 30:
        raise ConfigError(
            f"primary.block_bytes = {config.block_bytes} is out of range: "
            f"give 1 byte to 1 GiB"
        )
    if (config.primary.slots is None) == (config.primary.bytes is None):
        raise ConfigError("primary needs exactly one of slots and bytes")
    if config.num_slots < 1:
        raise ConfigError(
            f"the primary has 0 blocks: one block takes {config.stride} bytes "
            f"(payload and a header page); raise primary.bytes or primary.slots"
        )
    _check_policy(config.primary.policy)
    _check_offers(config.primary)
    if len(config.tier) > MAX_TIERS:
        raise ConfigError(f"{len(config.tier)} tiers are too many: {MAX_TIERS} at most")
    _check_tiers(config)
    _check_limits(config.limits)
    if config.credit_bytes < config.stride:
        raise ConfigError(
            f"limits.credit_bytes = {config.credit_bytes} is below one block "
            f"({config.stride} bytes): nothing would ever be stored; raise it"
        )


def _check_limits(limits: LimitsConfig) -> None:
    for name in limits.__struct_fields__:
        value = getattr(limits, name)
        is_time = name.endswith("_s")
        is_off = value == 0 and name == "prefill_s_per_block"
        if not isinstance(value, str) and not (0 < value < math.inf or is_off):
            raise ConfigError(f"limits.{name} = {value} must be a number above 0")
        if is_time and not MIN_WAIT_S <= value <= MAX_WAIT_S:
            what = "longer than a day" if value > MAX_WAIT_S else "too short"
            raise ConfigError(
                f"limits.{name} = {value:g} is {what}: give {MIN_WAIT_S} to "
                f"{MAX_WAIT_S} (seconds)"
            )
    if limits.max_cascade_share > 1:
        raise ConfigError(
            f"limits.max_cascade_share = {limits.max_cascade_share} is a part "
            f"of the slots: give at most 1"
        )
    if limits.hung_after_s < 2 * limits.heartbeat_s:
        raise ConfigError(
            f"limits.hung_after_s = {limits.hung_after_s:g} would find healthy workers "
            f"hung, which beat every {limits.heartbeat_s:g} s: give at least twice "
            f"limits.heartbeat_s"
        )


def _check_policy(name: str) -> None:
    if name not in BUILT_IN_POLICIES:
        # Here and not above: 20-30 ms that a built-in policy does not pay.
        from importlib.metadata import entry_points

        known = (*BUILT_IN_POLICIES, *entry_points(group=POLICY_GROUP).names)
        if name not in known:
            raise ConfigError(
                f'primary.policy = "{cut(name)}" is no eviction policy: '
                f"{closest(name, known, 'did you mean {}?', 'known are {}')}"
            )


def _check_offers(primary: PrimaryConfig) -> None:
    if primary.store_threshold < 0:
        raise ConfigError(
            f"primary.store_threshold = {primary.store_threshold} is below 0: give "
            f"the number of offers, or 0 to store a block at its first"
        )
    if not 1 <= primary.max_tracker_size <= MAX_TRACKED:
        raise ConfigError(
            f"primary.max_tracker_size = {primary.max_tracker_size} is out of range: "
            f"give 1 to {MAX_TRACKED}; each takes about 200 bytes of memory"
        )


def _check_tiers(config: Config) -> None:
    seen: set[str] = set()
    for tier in config.tier:
        if not _NAME.fullmatch(tier.name):
            raise ConfigError(
                f'tier name "{cut(tier.name)}" is not usable: take a-z 0-9 _ -'
            )
        if tier.name in seen:
            raise ConfigError(
                f'two tiers are named "{tier.name}": give each [[tier]] its own name'
            )
        seen.add(tier.name)
        if tier.max_bytes is not None:
            bound = parse_size(tier.max_bytes, key=f"tier {tier.name}: max_bytes")
            if bound < config.stride:
                raise ConfigError(
                    f"tier {tier.name}: max_bytes = {bound} holds no block; one takes "
                    f"{config.stride} bytes: raise max_bytes"
                )
        if tier.path is not None and not _is_path(tier.path):
            raise ConfigError(
                f"tier {tier.name}: path is empty, has a NUL in it, is no text, or is "
                f"longer than {MAX_PATH_BYTES} bytes: give a directory"
            )
        if tier.key_file is not None and not _is_path(tier.key_file):
            raise ConfigError(
                f"tier {tier.name}: key_file is empty, has a NUL in it, is no text, "
                f"or is longer than {MAX_PATH_BYTES} bytes: give a file with a key"
            )
        try:
            parse_admit(tier.admit)
        except ValueError as error:
            raise ConfigError(f"tier {tier.name}: admit = {error}") from error
        parse_size(tier.min_free, key=f"tier {tier.name}: min_free")
        if not 1 <= tier.threads <= 8:
            raise ConfigError(
                f"tier {tier.name}: threads = {tier.threads}: give 1 to 8"
            )
        if not 0 <= tier.nice <= 19:
            raise ConfigError(f"tier {tier.name}: nice = {tier.nice}: give 0 to 19")


def _is_path(path: str) -> bool:
    try:
        num_bytes = len(path.encode())
    except UnicodeEncodeError:  # half a surrogate pair, as JSON can carry it
        return False
    return 0 < num_bytes <= MAX_PATH_BYTES and "\0" not in path


_SECTIONS: Final[dict[str, type[msgspec.Struct]]] = {
    "session": SessionConfig,
    "primary": PrimaryConfig,
    "tier": TierConfig,
    "limits": LimitsConfig,
}


def _refuse_unknown(raw: dict[str, Any], struct: type[msgspec.Struct], at: str) -> None:
    """Refuse a key that no struct has, naming the closest one that exists."""
    known = struct.__struct_fields__
    for key, value in raw.items():
        if key not in known:
            raise ConfigError(
                f"unknown key {at}{cut(key)}: "
                f"{closest(key, known, 'did you mean {}?', 'known are {}')}"
            )
        if struct is not Config or key not in _SECTIONS:
            continue
        for part in value if key == "tier" and isinstance(value, list) else [value]:
            if isinstance(part, dict):
                _refuse_unknown(part, _SECTIONS[key], f"{key}.")


def closest(word: str, known: tuple[str, ...], one: str, many: str) -> str:
    """Phrase the closest known word, or all of them if none is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return one.format(near[0]) if near else many.format(", ".join(sorted(known)))
