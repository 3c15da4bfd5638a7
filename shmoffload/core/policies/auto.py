"""``auto``: the policy that would have had the most hits of late.

Covers: following the best of three shadows; LRU where they leave a choice.
Does not cover: the shadows themselves, pins (``manager``).
Who calls it: ``manager``, scheduler thread.

No policy is best everywhere: LRU wins with a roomy primary, ARC and "only what was
used twice" with a tight one (conversation at 1 %: .054, .088 and .106). So three
shadows see every request, and every 100 requests the primary may turn to another.

A shadow sees a request in the parts in which the policy hears of it: what was
loaded and what is offered, each key once, at each offer; what is left, and the
order among all its blocks, when it finishes. One offer of everything is the same
as one whole request. A shadow scores the leading keys that it held, over all parts.

*Loose* is what has a slot and is not held by the shadow that is followed. It goes
first, in the order in which the shadow let it go. After a turn the primary is
searched for it, a bounded part per call.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from shmoffload.core.policies import CachePolicy
from shmoffload.core.policies.lru import LruPolicy
from shmoffload.core.policies.order import Chain, tail_first
from shmoffload.core.policies.shadows import ArcShadow, LruShadow, SecondUseShadow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shmoffload.core.policies.shadows import Shadow
    from shmoffload.core.types import OffloadKey, ReqContext

PERIOD: Final = 100
"""Requests between two looks at the scores."""
DECAY: Final = 0.9
MARGIN: Final = 1.02
"""Another shadow has to be better by 2 % and one hit."""
SEARCHED_PER_CALL: Final = 4096


class _Heard:
    """What was heard of one request.

    Attributes:
        told: keys that the shadows have seen.
        untold: keys that were loaded and not told yet.
        unbroken: per shadow, whether it held every key so far.
        num_parts: how often the shadows were told.
    """

    __slots__ = ("num_parts", "told", "unbroken", "untold")

    def __init__(self, num_shadows: int) -> None:
        self.told: dict[OffloadKey, None] = {}
        self.untold: dict[OffloadKey, None] = {}
        self.unbroken = [True] * num_shadows
        self.num_parts = 0


class AutoPolicy(CachePolicy):
    """The default.

    Args:
        num_slots: slots of the primary.
    """

    def __init__(self, num_slots: int) -> None:
        self._order = LruPolicy()
        self._shadows: tuple[Shadow, ...] = (
            LruShadow(num_slots),
            ArcShadow(num_slots),
            SecondUseShadow(num_slots),
        )
        self._scores = [0.0] * len(self._shadows)
        self._followed = 0
        self._num_requests = 0
        self._loose: Chain[OffloadKey] = Chain()
        self._search: Iterator[OffloadKey] | None = None
        self._requests: dict[str, _Heard] = {}
        self._last_told: _Heard | None = None

    @property
    def followed(self) -> str:
        """Name of the policy that is followed now: lru, arc2 or second."""
        return ("lru", "arc2", "second")[self._followed]

    def offer(
        self,
        keys: Sequence[OffloadKey],
        absent: Sequence[OffloadKey],
        ctx: ReqContext,
        *,
        may_refuse: bool,
    ) -> Sequence[OffloadKey]:
        """Tell the shadows; admit what the followed one holds now."""
        heard = self._heard(ctx)
        untold = heard.untold
        untold.update(dict.fromkeys(key for key in keys if key not in heard.told))
        if untold:
            self._tell(heard, ctx)
        if not may_refuse:
            return absent
        shadow = self._shadows[self._followed]
        return [key for key in absent if key in shadow]

    def insert(self, key: OffloadKey, ctx: ReqContext) -> None:
        """Take in a key; loose if only a tier or a rule wanted it in."""
        self._order.insert(key, ctx)
        if key not in self._shadows[self._followed]:
            self._loose.add(key)

    def access(
        self, key: OffloadKey, ctx: ReqContext, *, is_ready: bool = True
    ) -> None:
        """Note a use; the shadows hear of it with the next offer."""
        self._order.access(key, ctx, is_ready=is_ready)
        heard = self._heard(ctx)
        if key not in heard.told:
            heard.untold[key] = None

    def remove(self, key: OffloadKey, *, evicted: bool) -> None:
        """Drop a key; the shadows keep their own mind."""
        self._order.remove(key, evicted=evicted)
        self._loose.discard(key)

    def finish(self, ctx: ReqContext) -> None:
        """Tell what is left, and put the request's heads last everywhere."""
        heard = self._heard(ctx)
        if heard.untold:
            self._tell(heard, ctx)
        elif heard.num_parts == 0:
            self._count_request()
        if heard.num_parts > 1 or self._last_told is not heard:
            keys = tail_first(heard.told, ctx)
            for shadow in self._shadows:
                shadow.settle(keys)
        del self._requests[ctx.req_id]
        self._order.finish(ctx)
        self._search_on()

    def victims(self, may_go: Callable[[OffloadKey], bool]) -> Iterator[OffloadKey]:
        """Yield what is loose, then the rest as LRU does."""
        loose = self._loose
        yield from filter(may_go, loose)
        yield from self._order.victims(lambda key: key not in loose and may_go(key))

    def clear(self) -> None:
        """Forget every key; what was followed is followed on."""
        self._order.clear()
        for shadow in self._shadows:
            shadow.clear()
        self._loose.clear()
        self._search = None
        self._requests.clear()
        self._last_told = None

    def _heard(self, ctx: ReqContext) -> _Heard:
        heard = self._requests.get(ctx.req_id)
        if heard is None:
            heard = self._requests[ctx.req_id] = _Heard(len(self._shadows))
        return heard

    def _tell(self, heard: _Heard, ctx: ReqContext) -> None:
        """Show the shadows the next part of a request, heads first."""
        part, positions = list(heard.untold), ctx.key_positions
        heard.untold.clear()
        if all(key in positions for key in part):
            part.sort(key=positions.__getitem__)  # merges the KV groups
        heard.told.update(dict.fromkeys(part))
        for i, shadow in enumerate(self._shadows):
            if heard.unbroken[i]:
                run = shadow.run_length(part)
                self._scores[i] += run
                heard.unbroken[i] = run == len(part)
            gone = shadow.use(part, heard.told)
            if i == self._followed:
                for key in gone:
                    if key in self._order:
                        self._loose.add(key)
        heard.num_parts += 1
        self._last_told = heard
        if heard.num_parts == 1:
            self._count_request()
        shadow = self._shadows[self._followed]
        for key in part:
            if key in shadow:
                self._loose.discard(key)
            elif key in self._order:
                self._loose.add(key)
        self._search_on()

    def _count_request(self) -> None:
        """Every so often, turn to the shadow with the most hits of late."""
        self._num_requests += 1
        if self._num_requests % PERIOD:
            return
        scores = self._scores
        best = scores.index(max(scores))
        if scores[best] > scores[self._followed] * MARGIN + 1:
            self._followed = best
            self._loose.clear()
            self._search = self._order.victims(lambda _: True)
        self._scores = [score * DECAY for score in scores]

    def _search_on(self) -> None:
        """Look at some more of the primary for what is loose since the turn.

        The walk is short-lived: each offer and each finish takes it on, so it
        keeps little of what is removed meanwhile (see ``Chain``).
        """
        if self._search is None:
            return
        part = list(islice(self._search, SEARCHED_PER_CALL))
        shadow = self._shadows[self._followed]
        for key in part:
            if key not in shadow:
                self._loose.add(key)
        if len(part) < SEARCHED_PER_CALL:
            self._search = None
