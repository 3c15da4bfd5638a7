"""Who is announced, and what the tiers are told of whom.

Covers: the announcement with the request's own words, the last words to tiers.
Does not cover: blocks and jobs of a request (``stores``, ``cascades``, ``scans``).
Who calls it: ``manager``, and whoever ends an open work; scheduler thread.

    announced -- finished --> closing -- no open work --> closed: tiers told
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmoffload.core.request_policy import (
    DEFAULT_POLICY,
    EVERY_TIER,
    OUR_KEY,
    RequestAnswer,
    RequestPolicy,
    named_tiers,
)
from shmoffload.core.requests import Request

if TYPE_CHECKING:
    from shmoffload.core.counters import Counters
    from shmoffload.core.interfaces import SecondaryTierManager
    from shmoffload.core.jobs import JobDesk
    from shmoffload.core.types import ReqContext


class RequestBook:
    """Requests, from the announcement until their tiers have heard the last word.

    Attributes:
        live: announced and not finished, by id.
        closing: finished, with open work left, by id.
        request_level_tiers: id -> tiers that want every block; only those.
    """

    def __init__(self, desk: JobDesk, counters: Counters) -> None:
        self.live: dict[str, Request] = {}
        self.closing: dict[str, Request] = {}
        self.request_level_tiers: dict[str, list[SecondaryTierManager]] = {}
        self._desk = desk
        self._counters = counters
        self._next_seq = 0

    def announce(self, ctx: ReqContext) -> Request:
        """Take in a request and tell every tier of it; again: the same record."""
        known = self.live.get(ctx.req_id)
        if known is not None:
            self._counters.late_calls += 1
            return known
        previous = self.closing.get(ctx.req_id)
        if previous is not None:
            # The id comes again before its stores are complete: for the tiers,
            # finished has to come before the new announcement.
            self._counters.late_calls += 1
            self.close(previous)
        words, answer = self._read(ctx)
        request = Request(ctx, self._next_seq, self._desk.announce(ctx, words))
        self._next_seq += 1
        self.live[ctx.req_id] = request
        if answer is not None:
            self._obey(request, words, answer)
        if request.asking:
            self.request_level_tiers[ctx.req_id] = [
                self._desk.tiers[idx] for idx in request.asking
            ]
        return request

    def answer(self, req_id: str) -> RequestAnswer | None:
        """Return what became of a request's words; None: unknown or closed."""
        request = self.live.get(req_id) or self.closing.get(req_id)
        if request is None:
            return None
        return request.answer or RequestAnswer(DEFAULT_POLICY)

    def finish(self, request: Request) -> None:
        """Note the last word of a request that was taken out of ``live``."""
        request.is_finished = True
        self.closing[request.ctx.req_id] = request
        self.maybe_close(request)

    def maybe_close(self, request: Request) -> None:
        """Tell the tiers, once nothing can follow for them."""
        if request.is_finished and request.open_work == 0 and not request.is_closed:
            self.close(request)

    def close(self, request: Request) -> None:
        """Tell the tiers, now; what an asking one did not get, it hears before."""
        request.is_closed = True
        request.open_work = 0
        del self.closing[request.ctx.req_id]
        self.request_level_tiers.pop(request.ctx.req_id, None)
        for idx in request.asking:
            missing = request.missing(idx)
            if missing:
                self._desk.incomplete(idx, request.ctx, missing)
        self._desk.finish(request.ctx)

    def reset(self) -> None:
        """Hear that nothing is open any more: finished requests end, others go on."""
        for request in self.live.values():
            request.open_work = 0
            request.no_room = None
        for request in list(self.closing.values()):
            self.close(request)

    def _read(
        self, ctx: ReqContext
    ) -> tuple[RequestPolicy | None, RequestAnswer | None]:
        """Return a request's words and the answer to them; None: it has none."""
        if not ctx.kv_transfer_params:
            return None, None
        words, notes = RequestPolicy.parse(ctx.kv_transfer_params)
        if not notes:
            return None, None
        answer = RequestAnswer(words, {note.key: note for note in notes})
        names = [tier.name for tier in self._desk.tiers]
        if words.levels:
            named = words.levels.keys() - {EVERY_TIER}
            if named:
                named_tiers(named, f"{OUR_KEY}.policy", names, answer)
            levels = {name: words.level_for(name) for name in names}
            ctx.tier_levels = {n: level for n, level in levels.items() if level}
        return words, answer

    def _obey(
        self, request: Request, words: RequestPolicy | None, answer: RequestAnswer
    ) -> None:
        assert words is not None
        request.answer = answer
        if words is DEFAULT_POLICY:
            return  # it had only bad words
        request.words = words
        traits = self._desk.traits
        names = [tier.name for tier in self._desk.tiers]
        if words.store_tiers is not None:
            key = f"{OUR_KEY}.store_tiers"
            request.store_to = named_tiers(words.store_tiers, key, names, answer)
        if words.load_tiers is not None:
            key = f"{OUR_KEY}.load_tiers"
            request.load_from = named_tiers(words.load_tiers, key, names, answer)
        if words.kv_load_tiers is not None:
            allowed = frozenset(
                idx
                for idx in range(len(names))
                if any(m.matches(traits[idx]) for m in words.kv_load_tiers)
            )
            before = request.load_from
            request.load_from = allowed if before is None else allowed & before
        if words.tenant is not None:
            request.tenant = self._counters.tenant(words.tenant)
            request.tenant.requests += 1
