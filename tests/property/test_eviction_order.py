"""Who is evicted, against an independent oracle of semantics.md 3.3 and 3.4.

Random requests with positions in any order, offers in parts, copies that end late,
shuffled or failed, blocks pinned by loads: every answer of ``prepare_store`` (what is
granted, what is evicted and in which order, or a refusal) has to be the oracle's. The
oracles keep plain sorted lists and share no code with the package.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.policies.registry import make_policy
from shmoffload.core.types import ReqContext, ScheduleEndContext, make_offload_key

NUM_SLOTS = 5
NUM_KEYS = 12
KEYS = [make_offload_key(b"key-%02d" % number) for number in range(NUM_KEYS)]


class LruOracle:
    """Ranks of semantics 3.3 as tuples, sorted at every question."""

    def __init__(self):
        self.clock = 0
        self.rank, self.of_request, self.used = {}, {}, {}

    def absent(self, keys, req):
        pass

    def insert(self, key, req, place):
        self._use(key, req, place)

    def present(self, key, req, place, *, ready):
        if ready and key not in self.used.get(req, ()):
            self._use(key, req, place)

    def _use(self, key, req, place):
        """Give the request's shared rank, deeper first; it never goes down."""
        if req not in self.of_request:
            self.clock += 1
            self.of_request[req] = self.clock
        self.used.setdefault(req, set()).add(key)
        self.rank[key] = max(
            self.rank.get(key, (0,)), (self.of_request[req], -place, key)
        )

    def failed(self, key):
        del self.rank[key]

    def evicted(self, keys):
        for key in keys:
            del self.rank[key]

    def finish(self, req, place_of):
        self.of_request.pop(req, None)
        mine = [k for k in self.used.pop(req, ()) if k in self.rank]
        for key in sorted(mine, key=lambda k: -place_of[k]):
            self.clock += 1
            self.rank[key] = (self.clock, 0, key)

    def choose(self, num, eligible):
        found = sorted(eligible, key=self.rank.__getitem__)[:num]
        return found if len(found) == num else None


class ArcOracle:
    """The lists of semantics 3.4; ``published``: ghosts return to T2, lists x4."""

    def __init__(self, *, published):
        self.published = published
        self.p = 0.0
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []
        self.seen, self.new, self.used = {}, {}, {}

    def absent(self, keys, req):
        for key in keys[::-1]:
            if key in self.seen.setdefault(req, []):
                continue
            self.seen[req].append(key)
            n1, n2 = len(self.b1), len(self.b2)
            if key in self.b1:
                self.p = min(NUM_SLOTS, self.p + max(1, n2 / n1))
                self.b1 = [k for k in self.b1 if k != key] + [key]
            if key in self.b2:
                self.p = max(0, self.p - max(1, n1 / n2))
                self.b2 = [k for k in self.b2 if k != key] + [key]

    def insert(self, key, req, place):
        self.new.setdefault(req, set()).add(key)
        returns = self.published and key in self.b1 + self.b2
        (self.t2 if returns else self.t1).append(key)
        self.b1 = [k for k in self.b1 if k != key]
        self.b2 = [k for k in self.b2 if k != key]

    def present(self, key, req, place, *, ready):
        # To read what it brought itself is no second use (vLLM cpu/manager.py).
        if ready and key not in self.new.get(req, ()):
            self.used.setdefault(req, set()).add(key)

    def failed(self, key):
        (self.t1 if key in self.t1 else self.t2).remove(key)

    def evicted(self, keys):
        most = NUM_SLOTS * (4 if self.published else 1)
        for key in keys:
            if key in self.t1:
                self.t1.remove(key)
                self.b1.append(key)
            else:
                self.t2.remove(key)
                self.b2.append(key)
        self.b1, self.b2 = self.b1[-most:], self.b2[-most:]

    def finish(self, req, place_of):
        self.seen.pop(req, None)
        new, used = self.new.pop(req, set()), self.used.pop(req, set())
        for key in sorted(new | used, key=lambda k: -place_of[k]):
            if key in self.t1:
                self.t1.remove(key)
                (self.t2 if key in used else self.t1).append(key)
            elif key in self.t2:
                self.t2.remove(key)
                self.t2.append(key)

    def choose(self, num, eligible):
        found, v = [], len(self.t1)
        while len(found) < num:
            left1 = [k for k in self.t1 if k in eligible and k not in found]
            left2 = [k for k in self.t2 if k in eligible and k not in found]
            if left1 and (v >= int(self.p) or not left2):
                found.append(left1[0])
                v -= 1
            elif left2:
                found.append(left2[0])
            else:
                return None
        return found


ORACLES = {
    "lru": LruOracle,
    "arc": lambda: ArcOracle(published=False),
    "arc2": lambda: ArcOracle(published=True),
}


class Both:
    """The manager and an oracle, told the same."""

    def __init__(self, policy):
        self.manager = TieringOffloadingManager(
            NUM_SLOTS, [], block_bytes=1, policy=make_policy(policy, NUM_SLOTS)
        )
        self.oracle = ORACLES[policy]()
        self.ctx, self.places = {}, {}
        self.ready, self.pending, self.pins = set(), {}, {}
        self.next_req = 0

    def new(self, places):
        req = str(self.next_req)
        self.next_req += 1
        self.places[req] = dict(zip(KEYS, places, strict=True))
        self.ctx[req] = ReqContext(req, key_positions=dict(self.places[req]))
        self.manager.on_new_request(self.ctx[req])

    def offer(self, req, keys):
        here = self.ready | self.pending.keys()
        absent = [k for k in keys if k not in here]
        self.oracle.absent(absent, req)
        need = len(absent) - (NUM_SLOTS - len(here))
        eligible = {k for k in self.ready if k not in keys and not self.pins.get(k)}
        gone = self.oracle.choose(need, eligible) if need > 0 else []
        granted = self.manager.prepare_store(keys, self.ctx[req])
        if gone is None:
            assert granted is None
            return
        assert granted is not None
        assert list(granted.keys_to_store) == absent
        assert list(granted.evicted_keys) == gone
        self.oracle.evicted(gone)
        self.ready -= set(gone)
        for key in absent:
            self.pending[key] = req
            self.oracle.insert(key, req, self.places[req][key])
        for key in [k for k in keys if k in here]:
            place, is_ready = self.places[req][key], key in self.ready
            self.oracle.present(key, req, place, ready=is_ready)

    def complete(self, key, *, ok):
        req = self.pending.pop(key)
        self.manager.complete_store([key], self.ctx[req], ok)
        if ok:
            self.ready.add(key)
        else:
            self.oracle.failed(key)

    def load(self, req, key):
        self.manager.prepare_load([key], self.ctx[req])
        self.pins.setdefault(key, []).append(req)
        self.oracle.present(key, req, self.places[req][key], ready=True)

    def unpin(self, key):
        self.manager.complete_load([key], self.ctx[self.pins[key].pop()])

    def finish(self, req):
        self.manager.on_request_finished(self.ctx[req])
        self.oracle.finish(req, self.places.pop(req))

    def step(self):
        self.manager.on_schedule_end(ScheduleEndContext())
        self.manager.check_integrity()


def play(both, data, num_steps):
    def pick(options):
        return data.draw(st.sampled_from(sorted(options)))

    for _ in range(num_steps):
        words = ["new"] * (len(both.places) < 3) + ["offer", "offer", "finish"] * bool(
            both.places
        )
        words += ["complete"] * 2 * bool(both.pending)
        words += ["load"] * bool(both.places and both.ready)
        words += ["unpin"] * any(both.pins.values())
        word = pick(words)
        if word == "new":
            both.new(data.draw(st.permutations(range(16, 16 * NUM_KEYS + 1, 16))))
        elif word == "offer":
            some = st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=4)
            both.offer(pick(both.places), data.draw(some))
        elif word == "complete":
            both.complete(pick(both.pending), ok=data.draw(st.integers(0, 5)) > 0)
        elif word == "load":
            both.load(pick(both.places), pick(both.ready))
        elif word == "unpin":
            both.unpin(pick(k for k, by in both.pins.items() if by))
        else:
            both.finish(pick(both.places))
        both.step()


@pytest.mark.parametrize("policy", ORACLES)
@given(data=st.data())
def test_victims_are_the_oracles(policy, data):
    play(Both(policy), data, num_steps=60)
