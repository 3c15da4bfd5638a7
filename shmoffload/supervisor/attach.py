"""May this engine be served? One sentence if not.

Covers: protocol version, session, configuration, descriptors of an ``Attach``.
Does not cover: whether another engine is served already (``loop``).
Who calls it: ``loop.Supervisor``; one thread; never waits.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any, Final

import msgspec

from shmoffload.errors import ConfigError
from shmoffload.wire import config as config_
from shmoffload.wire.messages import MAX_EPOCH, PROTOCOL_VERSION
from shmoffload.wire.session import MAGIC, SessionPage, Word
from shmoffload.wire.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmoffload.wire.config import Config
    from shmoffload.wire.messages import Attach

_SIZES: Final = {"block_bytes", "bytes", "max_bytes", "min_free", "credit_bytes"}


def check_attach(message: Attach, *, session: str, config: Config | None) -> str:
    """Return why an ``Attach`` is refused, "" if it is not.

    Args:
        message: what the engine sent.
        session: the one that we serve.
        config: the daemon's own; None for an embedded supervisor.
    """
    if message.version != PROTOCOL_VERSION:
        return (
            f"the engine speaks protocol {message.version}, the supervisor "
            f"{PROTOCOL_VERSION}: install one version of shmoffload for both"
        )
    if not 0 < message.engine_epoch <= MAX_EPOCH + 1:
        return f"{message.engine_epoch} is no engine epoch: start the engine again"
    try:
        theirs = config_.decode(message.config)
    except ConfigError as error:
        return str(error)
    if not session == message.session == theirs.session.name:
        return (
            f'this supervisor serves session "{session}", not "{message.session}": '
            f"set session.name to one of them on both sides"
        )
    return "" if config is None else differing_key(config, theirs)


def differing_key(ours: Config, theirs: Config) -> str:
    """Name the first key that the daemon and an engine have differently.

    Of those that both act on: tiers and heartbeats. Primary, namespace and the
    other limits are the engine's to say; an adapter computes them.
    """
    left, right = (dict(_shared(config)) for config in (ours, theirs))
    for key in [*left, *(key for key in right if key not in left)]:
        if left.get(key) != right.get(key):
            return (
                f"{key} is {left.get(key)} for the daemon and {right.get(key)} for "
                f"the engine: give both the same configuration file, restart the daemon"
            )
    return ""


def _shared(config: Config) -> Iterator[tuple[str, Any]]:
    yield from _flat(msgspec.to_builtins(config.tier), "tier.")
    for key in ("heartbeat_s", "hung_after_s"):
        yield f"limits.{key}", getattr(config.limits, key)


def _flat(value: Any, at: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yield dotted keys; sizes as bytes, so that 64KiB is 65536."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in _SIZES and item is not None:
                yield f"{at}{key}", parse_size(item)
            else:
                yield from _flat(item, f"{at}{key}.")
    elif isinstance(value, (list, tuple)):
        for idx, item in enumerate(value):
            yield from _flat(item, f"{at}{idx}.")
    else:
        yield at.rstrip("."), value


def map_page(page_fd: int, config: Config) -> SessionPage | None:
    """Map an engine's page; takes ``page_fd`` over. None if it is none of ours."""
    size = os.fstat(page_fd).st_size
    try:
        is_whole = size > 0 and size % mmap.PAGESIZE == 0
        page = SessionPage.from_fd(page_fd) if is_whole else None
    except (OSError, ValueError):  # nothing that can be mapped
        page = None
    if page is None:
        os.close(page_fd)
        return None
    fits = (
        page.get(Word.MAGIC) == MAGIC
        and page.num_tiers == len(config.tier)
        and page.tier_base(page.num_tiers) <= len(page.words)
        and page.session == config.session.name
    )
    if not fits:
        page.close()
        return None
    return page


def same_object(fd: int, other_fd: int) -> bool:
    """Say whether two descriptors are of one file."""
    left, right = os.fstat(fd), os.fstat(other_fd)
    return (left.st_dev, left.st_ino) == (right.st_dev, right.st_ino)
