"""What one request says about its own blocks, and what became of each word.

Covers: reading ``kv_transfer_params``, bounds, which tiers and levels are meant.
Does not cover: obeying (``cascades``, ``promotions``, ``retention``, ``planner``),
logging (the engine logs the notes).
Who calls it: ``request_book`` and ``planner``, scheduler thread.

The words are the request's, so anything may be in them. A bad value is noted and
ignored, a value out of bounds is clipped, and nothing here raises.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shmoffload.core.types import OffloadPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shmoffload.core.types import TierTraits

OUR_KEY: Final = "shmoffload"
"""Our dict inside ``kv_transfer_params``."""
EVERY_TIER: Final = "*"
MAX_PRIORITY: Final = 3
MAX_TTL_S: Final = 7 * 86400.0
MAX_TENANT_CHARS: Final = 64
MAX_TIER_WORDS: Final = 64
"""Entries of a list of tiers that are read; we have 8 tiers at most."""
_MAX_SHOWN_CHARS: Final = 40
_MEDIA: Final = ("CPU", "STORAGE")
_LOCALITIES: Final = ("LOCAL", "REMOTE")


class Verdict(enum.Enum):
    """What became of a word."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    REJECTED = "rejected"


class Note(NamedTuple):
    """One word of a request, what became of it, and why unless accepted."""

    key: str
    verdict: Verdict
    why: str = ""


class TierMatcher(NamedTuple):
    """One entry of ``kv_load_tiers``; None = any (vLLM since 0.27, #48123)."""

    medium: str | None = None
    locality: str | None = None

    def matches(self, traits: TierTraits) -> bool:
        """Say whether a tier is meant; what is not known of it matches."""
        return (self.medium is None or traits.medium in (None, self.medium)) and (
            self.locality is None or traits.locality in (None, self.locality)
        )


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """A request's words, checked. None or a default = not said.

    Attributes:
        max_offload_tokens: blocks that end beyond it are not stored.
        max_load_tokens: blocks that end beyond it are not loaded.
        kv_load_tiers: tiers that may serve its lookups; () = none.
        store_tiers: names of the tiers that may get its blocks.
        load_tiers: names of the tiers that may serve its lookups.
        levels: tier name, or ``EVERY_TIER`` -> what that tier gets.
        ttl_s: how long its stored blocks are worth keeping.
        pin: its blocks shall stay while it lives.
        priority: 0 to ``MAX_PRIORITY``; higher goes later.
        tenant: whom it is counted for.
    """

    max_offload_tokens: int | None = None
    max_load_tokens: int | None = None
    kv_load_tiers: tuple[TierMatcher, ...] | None = None
    store_tiers: frozenset[str] | None = None
    load_tiers: frozenset[str] | None = None
    levels: Mapping[str, OffloadPolicy] = field(default_factory=dict)
    ttl_s: float | None = None
    pin: bool = False
    priority: int = 0
    tenant: str | None = None

    @staticmethod
    def parse(params: object) -> tuple[RequestPolicy, list[Note]]:
        """Read ``kv_transfer_params``; one note per word of ours.

        Keys of others are left alone. Never raises.
        """
        if not params:
            return DEFAULT_POLICY, []
        if not isinstance(params, Mapping):
            return DEFAULT_POLICY, [_rejected("kv_transfer_params", "no mapping")]
        values: dict[str, Any] = {}
        notes: list[Note] = []
        _read(params, _VLLM_WORDS, "", values, notes)
        ours = params.get(OUR_KEY)
        if isinstance(ours, Mapping):
            _read(ours, _OUR_WORDS, f"{OUR_KEY}.", values, notes)
            unknown = [key for key in ours if key not in _OUR_WORDS]
            if unknown:
                why = (
                    f"unknown key {_shown(unknown[0])}; known: {', '.join(_OUR_WORDS)}"
                )
                notes.append(_rejected(OUR_KEY, why))
        elif ours is not None:
            notes.append(_rejected(OUR_KEY, f"{_shown(ours)} is no mapping"))
        return (RequestPolicy(**values) if values else DEFAULT_POLICY), notes

    @property
    def shapes_eviction(self) -> bool:
        """Whether its blocks go earlier or later than the eviction order says."""
        return self.pin or self.priority > 0 or self.ttl_s is not None

    def level_for(self, tier_name: str) -> OffloadPolicy | None:
        """Return what it says that a tier gets; None: nothing said."""
        levels = self.levels
        return levels.get(tier_name) or levels.get(EVERY_TIER) if levels else None


DEFAULT_POLICY: Final = RequestPolicy()


@dataclass(slots=True)
class RequestAnswer:
    """What the manager made of a request's words; it may change while it lives.

    Attributes:
        policy: the words that count.
        notes: one per word, by key.
    """

    policy: RequestPolicy
    notes: dict[str, Note] = field(default_factory=dict)

    def note(self, note: Note) -> None:
        """Set what became of a word; a worse verdict is not made better."""
        old = self.notes.get(note.key)
        if old is None or _BADNESS[note.verdict] >= _BADNESS[old.verdict]:
            self.notes[note.key] = note


_BADNESS: Final = {verdict: rank for rank, verdict in enumerate(Verdict)}


def named_tiers(
    names: Iterable[str], key: str, known: Sequence[str], answer: RequestAnswer
) -> frozenset[int] | None:
    """Return the indices of named tiers; None: none of the names is known.

    A word that names only tiers which do not exist is ignored, as a bad value is.
    """
    unknown = sorted(set(names).difference(known))
    if unknown:
        why = f"no tier {_shown(unknown[0])}; there are: {', '.join(known) or 'none'}"
        if not set(names) & set(known):
            answer.note(_rejected(key, why))
            return None
        answer.note(Note(key, Verdict.CLIPPED, why))
    return frozenset(idx for idx, name in enumerate(known) if name in set(names))


class _BadValueError(Exception):
    """A value that is ignored; the text says what would be right."""


class _Clipped(NamedTuple):
    value: object
    why: str


def _read(
    words: Mapping[str, object],
    parsers: Mapping[str, Callable[[Any], object]],
    prefix: str,
    values: dict[str, Any],
    notes: list[Note],
) -> None:
    for key, parser in parsers.items():
        raw = words.get(key)
        if raw is None:
            continue
        try:
            value = parser(raw)
        except _BadValueError as error:
            notes.append(_rejected(prefix + key, f"{_shown(raw)}: {error}"))
            continue
        verdict, why = Verdict.ACCEPTED, ""
        if isinstance(value, _Clipped):
            verdict, (value, why) = Verdict.CLIPPED, value
        values["levels" if key == "policy" else key] = value
        notes.append(Note(prefix + key, verdict, why))


def _tokens(raw: object) -> int:
    if type(raw) is not int or raw < 0:  # not isinstance: True is no count
        raise _BadValueError("give a whole number, 0 or more")
    return raw


def _matchers(raw: object) -> object:
    if not isinstance(raw, list):
        raise _BadValueError("give a list of {medium, locality}")
    found, bad = [], 0
    for entry in raw[:MAX_TIER_WORDS]:
        matcher = _matcher(entry)
        if matcher is None:
            bad += 1
        else:
            found.append(matcher)
    if raw and not found:
        raise _BadValueError("no entry is a {medium, locality} that we know")
    if bad or len(raw) > MAX_TIER_WORDS:
        return _Clipped(tuple(found), f"{len(raw) - len(found)} entries are ignored")
    return tuple(found)


def _matcher(entry: object) -> TierMatcher | None:
    if not isinstance(entry, Mapping):
        return None
    chosen: list[str | None] = []
    for key, known in (("medium", _MEDIA), ("locality", _LOCALITIES)):
        raw = entry.get(key)
        value = raw.upper() if isinstance(raw, str) else raw
        if value is not None and value not in known:
            return None
        chosen.append(value)
    return TierMatcher(*chosen)


def _names(raw: object) -> object:
    if not isinstance(raw, list) or not all(isinstance(name, str) for name in raw):
        raise _BadValueError("give a list of tier names")
    if len(raw) > MAX_TIER_WORDS:
        why = f"names after the first {MAX_TIER_WORDS} are ignored"
        return _Clipped(frozenset(raw[:MAX_TIER_WORDS]), why)
    return frozenset(raw)


def _levels(raw: object) -> dict[str, OffloadPolicy]:
    words: Mapping[Any, Any] = raw if isinstance(raw, Mapping) else {EVERY_TIER: raw}
    known = {level.value: level for level in OffloadPolicy}
    if len(words) > MAX_TIER_WORDS or not all(
        isinstance(name, str) and isinstance(word, str) and word in known
        for name, word in words.items()
    ):
        choice = " or ".join(known)
        raise _BadValueError(f"give {choice}, or one of them per tier name")
    return {name: known[word] for name, word in words.items()}


def _ttl_s(raw: object) -> object:
    if type(raw) not in (int, float) or not raw > 0:  # type: ignore[operator]
        raise _BadValueError("give seconds above 0")
    if raw > MAX_TTL_S:  # type: ignore[operator]
        return _Clipped(MAX_TTL_S, f"at most {MAX_TTL_S:.0f} s")
    return float(raw)  # type: ignore[arg-type]


def _pin(raw: object) -> bool:
    if type(raw) is not bool:
        raise _BadValueError("give true or false")
    return raw


def _priority(raw: object) -> object:
    if type(raw) is not int:
        raise _BadValueError(f"give a whole number, 0 to {MAX_PRIORITY}")
    if not 0 <= raw <= MAX_PRIORITY:
        return _Clipped(min(max(raw, 0), MAX_PRIORITY), f"0 to {MAX_PRIORITY}")
    return raw


def _tenant(raw: object) -> str:
    if not isinstance(raw, str) or not 0 < len(raw) <= MAX_TENANT_CHARS:
        raise _BadValueError(f"give a text of 1 to {MAX_TENANT_CHARS} characters")
    return raw


_VLLM_WORDS: Final[dict[str, Callable[[Any], object]]] = {
    "max_offload_tokens": _tokens,
    "max_load_tokens": _tokens,
    "kv_load_tiers": _matchers,
}
_OUR_WORDS: Final[dict[str, Callable[[Any], object]]] = {
    "store_tiers": _names,
    "load_tiers": _names,
    "policy": _levels,
    "ttl_s": _ttl_s,
    "pin": _pin,
    "priority": _priority,
    "tenant": _tenant,
}


def _rejected(key: str, why: str) -> Note:
    return Note(key, Verdict.REJECTED, why)


def _shown(raw: object) -> str:
    """Show a value of a stranger, at bounded length and cost."""
    if isinstance(raw, str):
        text = repr(raw[:_MAX_SHOWN_CHARS])
    elif isinstance(raw, bool | float) or raw is None:
        text = repr(raw)
    elif isinstance(raw, int):
        # Not repr: Python refuses to print an int of more than 4300 digits.
        text = repr(raw) if abs(raw) < 10**_MAX_SHOWN_CHARS else "a huge number"
    else:
        text = f"a {type(raw).__name__}"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
