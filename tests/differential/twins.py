"""One trace, two managers: vLLM's and ours, call by call.

Covers: every call goes to both; after it answers, grants, victims, jobs, blocks
and pins have to be equal. What ``docs/decisions.md`` lists as different is
translated or stepped around here, in one place each, and counted in ``avoided``.
Does not cover: which calls are made (``random_trace``), slot numbers (vLLM frees in
the order of a set).
Who calls it: the differential tests.

Translations, each a row of docs/decisions.md ("beside vLLM, rule by rule"):

- ``polling``: answers are put in between calls and both poll at once;
- ``refused``: vLLM notes a use of blocks by an offer that it refuses; taken back;
- ``reserved``: a call in which vLLM would evict what a scan counts on is not made;
- ``failed``: a key whose promotion failed is not looked up again by that request;
- ``waiting``: a promotion without room while others promote or load is not tried;
- ``queued``: a request does not finish between its promotion and the step's end;
- ``parked``: the step ends as soon as a parked key's block is readable;
- ``shares``: promotions and cascades may fill the primary, as in vLLM;
- ``pending work``: vLLM counts cascades, we do not;
- ``provisional``: vLLM before 0.33 ranks an active request's blocks otherwise.
"""

from collections import Counter

from vllm_kit import (
    HAS_PROVISIONAL_RANKS,
    VLLM,
    Observations,
    OurTier,
    held_by_theirs,
    key,
    keys,
    make_theirs,
    number,
    numbers,
    would_evict,
)

from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.slots import PENDING
from shmoffload.core.types import ReqContext, ScheduleEndContext

FOR_EVER_S = 1e12


class DifferenceError(AssertionError):
    """The managers differ where docs/decisions.md lists no difference."""


class Asker:
    """One request on both sides, and what its scans count on."""

    def __init__(self, req_id, positions):
        self.ours = ReqContext(req_id)
        self.theirs = VLLM.base.ReqContext(req_id)
        for num, position in positions.items():
            self.ours.key_positions[key(num)] = position
            self.theirs.set_offload_key_position(key(num), position)
        self.req_id = req_id
        self.scan, self.before = set(), set()
        self.is_deferred = self.is_undecided = False
        self.has_scanned = False  # in this step
        self.has_queued = False
        self.failed = set()
        self.used = set()


class Twins:
    def __init__(self, num_slots, *, wants_all=(False,), policy="lru", ours=None):
        self.policy = policy
        self.num_slots = num_slots
        self.our_tiers = [OurTier(wants) for wants in wants_all]
        # Shares of promotions and cascades are ours alone: never reached like this.
        self.ours = TieringOffloadingManager(
            num_slots,
            self.our_tiers,
            block_bytes=64,
            policy=ours,
            promotion_share=1e6,
            max_cascade_share=1e6,
            scan_hold_s=FOR_EVER_S,
            job_deadline_s=FOR_EVER_S,
        )
        self.theirs, self.their_tiers = make_theirs(num_slots, wants_all, policy)
        self.active = {}
        self.jobs = []  # (tier, kind and keys, our id, their id)
        self.num_loads = 0  # that run
        self.told = set()  # counted in this step
        self.log = []
        self.avoided = Counter()
        self.compared = Counter()

    # Calls --------------------------------------------------------------------

    def announce(self, req_id, positions):
        self.log.append(("announce", req_id, positions))
        asker = self.active[req_id] = Asker(req_id, positions)
        ours = self.ours.on_new_request(asker.ours).policy.name
        theirs = self.theirs.on_new_request(asker.theirs).policy.name
        self._equal("policy", ours, theirs.replace("CHUNK", "BLOCK"))
        return asker

    def lookup(self, asker, num):
        """Return the answer of both, or None: the call was not made."""
        reason = self._why_not_lookup(asker, num)
        if reason:
            self.avoided[reason] += 1
            return None
        self.log.append(("lookup", asker.req_id, num))
        if not asker.has_scanned:  # the last scan counts until this step ends
            asker.has_scanned = True
            asker.before, asker.scan = asker.scan, set()
            asker.is_deferred = False
        before = Observations(self.theirs, asker.theirs)
        was_absent = num not in held_by_theirs(self.theirs)
        theirs = self.theirs.lookup(key(num), asker.theirs).name
        if theirs == "MISS":
            before.forget()  # refused
        ours = self.ours.lookup(key(num), asker.ours).name
        self._equal("lookup", ours, theirs)
        if ours.startswith("HIT"):
            asker.scan.add(num)
            self.told.add(num)
        if ours == "HIT_PENDING" and was_absent:
            asker.has_queued = True
            asker.used.add(num)
        if ours in {"HIT_PENDING", "RETRY"}:
            asker.is_deferred = asker.is_undecided = True
        self.compared["lookup " + ours] += 1
        self._check()
        return ours

    def load(self, asker, nums):
        self.log.append(("load", asker.req_id, nums))
        self.num_loads += 1
        self.ours.prepare_load(keys(nums), asker.ours)
        self.theirs.prepare_load(keys(nums), asker.theirs)
        self._decide(asker)
        asker.used.update(nums)
        self.compared["load"] += 1
        self._check()

    def complete_load(self, asker, nums):
        self.log.append(("complete_load", asker.req_id, nums))
        self.num_loads -= 1
        self.ours.complete_load(keys(nums), asker.ours)
        self.theirs.complete_load(keys(nums), asker.theirs)
        self._check()

    def store(self, asker, nums):
        """Return the numbers granted, None: refused; ``False``: not asked."""
        reason = self._why_not_store(asker, nums)
        if reason:
            self.avoided[reason] += 1
            return False
        self.log.append(("store", asker.req_id, nums))
        before = Observations(self.theirs, asker.theirs)
        theirs = self.theirs.prepare_store(keys(nums), asker.theirs)
        ours = self.ours.prepare_store(keys(nums), asker.ours)
        self._equal("refused", ours is None, theirs is None)
        if theirs is None:
            before.forget()
            self.compared["store refused"] += 1
            self._check()
            return None
        granted = numbers(ours.keys_to_store)
        self._equal("granted", granted, numbers(theirs.keys_to_store))
        evicted = numbers(ours.evicted_keys)
        self._equal("victims", evicted, numbers(theirs.evicted_keys))
        asker.used.update(nums)
        self.compared["store"] += 1
        self.compared["victim"] += len(evicted)
        self._check()
        return granted

    def complete_store(self, asker, nums, *, ok):
        self.log.append(("complete_store", asker.req_id, nums, ok))
        self.ours.complete_store(keys(nums), asker.ours, ok)
        self.theirs.complete_store(keys(nums), asker.theirs, ok)
        self._check()

    def finish(self, asker):
        if asker.has_queued:
            self.avoided["queued"] += 1
            self.end_step()
        self.log.append(("finish", asker.req_id))
        del self.active[asker.req_id]
        self.ours.on_request_finished(asker.ours)
        self.theirs.on_request_finished(asker.theirs)
        self._check()

    def answer(self, idx, *, ok, arrived=None):
        """Let both tiers answer an open job; ``arrived``: numbers of a promotion."""
        tier, (is_promotion, req_id, nums), our_id, their_id = self.jobs.pop(idx)
        self.log.append(("answer", tier, is_promotion, req_id, nums, ok, arrived))
        good = keys(arrived) if arrived is not None else None
        self.our_tiers[tier].finish(our_id, ok, good)
        self.their_tiers[tier].finish(their_id, ok, good)
        if not is_promotion and ok:
            self._tell(tier, nums, True)
        elif is_promotion and not ok:
            lost = set(nums) - set(arrived or ())
            self._tell(tier, lost, False)
            for asker in self.active.values():
                if asker.req_id == req_id:
                    asker.failed |= lost
        self.ours.advance(0.0)
        self.theirs._process_finished_jobs()
        self._check()

    def know(self, tier, num, verdict):
        """Let a tier answer HIT, MISS or RETRY for a number from now on."""
        self.log.append(("know", tier, num, verdict))
        self._tell(tier, [num], verdict == "HIT")
        for side in (self.our_tiers, self.their_tiers):
            (
                side[tier].unknown.add
                if verdict == "RETRY"
                else side[tier].unknown.discard
            )(num)

    def end_step(self):
        self.log.append(("end_step",))
        self.ours.on_schedule_end(ScheduleEndContext())
        self.theirs.on_schedule_end(VLLM.base.ScheduleEndContext([], []))
        self.told.clear()
        for asker in self.active.values():
            asker.before = set()
            if asker.has_scanned and not asker.is_deferred:
                self._decide(asker)
            asker.has_scanned = asker.has_queued = False
        self._check()

    def reset(self):
        """Reset with nothing open; with something open we never wait, vLLM does."""
        assert not self.jobs
        self.log.append(("reset",))
        self.ours.reset_cache()
        self.theirs.reset_cache()
        self.ours.on_reset_flushed()
        if hasattr(self.theirs, "on_reset_flushed"):
            self.theirs.on_reset_flushed()
        self.told.clear()
        for asker in self.active.values():
            asker.used = set()
            self._decide(asker)
        self._check()

    # What may differ ----------------------------------------------------------

    def _why_not_lookup(self, asker, num):
        held = held_by_theirs(self.theirs)
        if num in held:
            return None
        if num in asker.failed:
            return "failed"
        if not any(tier.verdict(key(num)) == "HIT" for tier in self.their_tiers):
            return None
        if len(held) < self.num_slots:
            return None
        victims = would_evict(self.theirs, asker.theirs, 1, keys([num]))
        if victims is None:
            others = self.num_loads or any(
                a.has_queued for a in self.active.values() if a is not asker
            )
            others = others or any(
                is_promotion and req_id != asker.req_id
                for _, (is_promotion, req_id, _), *_ in self.jobs
            )
            return "waiting" if others else None
        if self._is_provisional():
            return "provisional"
        reserved = self.told.union(
            *(a.scan | a.before for a in self.active.values() if a.is_undecided)
        )
        reserved |= asker.scan | asker.before
        return "reserved" if victims[0] in reserved else None

    def _why_not_store(self, asker, nums):
        held = held_by_theirs(self.theirs)
        need = len(set(nums) - held.keys()) - (self.num_slots - len(held))
        if need <= 0:
            return None
        victims = would_evict(self.theirs, asker.theirs, need, keys(nums))
        if victims is None:
            return None
        if self._is_provisional():
            return "provisional"
        return "reserved" if self.told.intersection(victims) else None

    def _is_provisional(self):
        """Say whether an idle block's place depends on a request that is active."""
        if HAS_PROVISIONAL_RANKS or self.policy != "lru":
            return False
        idle = {num for num, pins in held_by_theirs(self.theirs).items() if pins == 0}
        return any(idle & asker.used for asker in self.active.values())

    # Comparison ---------------------------------------------------------------

    def _check(self):
        held = held_by_theirs(self.theirs)
        parked = {
            number(k)
            for state in self.theirs._req_state.values()
            for k in state.pending_cascade_keys
        }
        if any(held.get(num) != "pending" for num in parked):
            self.avoided["parked"] += 1
            self.end_step()
            return
        ours = {
            number(k): "pending" if block.state == PENDING else block.pins
            for k, block in self.ours.table.blocks.items()
        }
        self._equal("blocks and pins", ours, held)
        self._match_jobs()
        self._equal("pending work", self.ours.has_pending_work(), self._their_work())
        for idx, (ours_, theirs_) in enumerate(
            zip(self.our_tiers, self.their_tiers, strict=True)
        ):
            self._equal(
                f"words to tier {idx}", Counter(ours_.told), Counter(theirs_.told)
            )

    def _match_jobs(self):
        for idx, (ours, theirs) in enumerate(
            zip(self.our_tiers, self.their_tiers, strict=True)
        ):
            # The jobs of one call may be told in any order.
            mine, other = sorted(ours.fresh), sorted(theirs.fresh)
            self._equal(
                f"jobs of tier {idx}",
                [job for job, _ in mine],
                [job for job, _ in other],
            )
            for (what, our_id), (_, their_id) in zip(mine, other, strict=True):
                self.jobs.append((idx, what, our_id, their_id))
                self.compared["promotion" if what[0] else "cascade"] += 1
            ours.fresh, theirs.fresh = [], []

    def _their_work(self):
        """Say what vLLM's manager would say if it did not count cascades."""
        theirs = self.theirs
        return bool(
            any(job.transfer_job.is_promotion for job in theirs._jobs.values())
            or theirs._pending_load_submissions
            or any(
                state.is_finished or state.pending_cascade_keys
                for state in theirs._req_state.values()
            )
        )

    def _equal(self, what, ours, theirs):
        if ours != theirs:
            calls = "\n  ".join(map(str, self.log[-25:]))
            raise DifferenceError(
                f"{what}: ours {ours!r}, vLLM's {theirs!r}, after\n  {calls}"
            )

    def _decide(self, asker):
        asker.scan, asker.before = set(), set()
        asker.is_undecided = False

    def _tell(self, tier, nums, has):
        for side in (self.our_tiers, self.their_tiers):
            (side[tier].have.update if has else side[tier].have.difference_update)(nums)
