"""``auto`` said naively: plain lists, whole requests, one at a time.

Covers: hits and evictions of every request.
Does not cover: parts, several requests at once, tiers.
Who calls it: tests of ``auto``. It shares no code with the package, and with
unlimited memory it gives the published figures of the policy (policies.md 2).
"""


def spare_oldest(order, num, own):
    """Remove and return the ``num`` oldest keys that the request does not use."""
    gone = [k for k in order if k not in own][: max(0, num)]
    order[:] = [k for k in order if k not in gone]
    return gone


def renew(order, of_keys):
    for k in reversed(of_keys):
        if k in order:
            order.remove(k)
            order.append(k)


class Lru:
    def __init__(self, size):
        self.size, self.order = size, []

    def held(self):
        return self.order

    def wants(self, of_keys):
        return [k for k in of_keys if k not in self.order]

    def use(self, of_keys):
        new = self.wants(of_keys)
        gone = spare_oldest(self.order, len(self.order) + len(new) - self.size, of_keys)
        self.order += new[: self.size - len(self.order)]
        renew(self.order, of_keys)
        return gone


class Second(Lru):
    def __init__(self, size):
        super().__init__(size)
        self.first, self.again = [], set()

    def wants(self, of_keys):
        for k in of_keys:
            if k in self.first:
                self.first.remove(k)
                self.again.add(k)
            self.first.append(k)
        for k in self.first[: -4 * self.size]:
            self.again.discard(k)
        self.first = self.first[-4 * self.size :]
        return [k for k in super().wants(of_keys) if k in self.again]


class Arc:
    def __init__(self, size):
        self.size, self.target = size, 0
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []

    def held(self):
        return self.t1 + self.t2

    def use(self, of_keys):
        absent = [k for k in of_keys if k not in self.held()]
        for k in reversed(absent):
            n1, n2 = len(self.b1), len(self.b2)
            if k in self.b1:
                self.target = min(self.target + max(1, n2 / n1), self.size)
            elif k in self.b2:
                self.target = max(self.target - max(1, n1 / n2), 0)
        gone1, gone2 = [], []
        for _ in range(len(self.held()) + len(absent) - self.size):
            free1 = [k for k in self.t1 if k not in of_keys]
            free2 = [k for k in self.t2 if k not in of_keys]
            if free1 and (len(self.t1) >= int(self.target) or not free2):
                self.t1.remove(free1[0])
                gone1.append(free1[0])
            elif free2:
                self.t2.remove(free2[0])
                gone2.append(free2[0])
        self.b1 = (self.b1 + gone1)[-2 * self.size :]
        self.b2 = (self.b2 + gone2)[-2 * self.size :]
        enter = absent[: self.size - len(self.held())]
        for k in reversed(of_keys):
            if k in enter:
                (self.t2 if k in self.b1 + self.b2 else self.t1).append(k)
            elif k in self.t1 or k in self.t2:
                (self.t1 if k in self.t1 else self.t2).remove(k)
                self.t2.append(k)
        self.b1 = [k for k in self.b1 if k not in enter]
        self.b2 = [k for k in self.b2 if k not in enter]
        return gone1 + gone2


class AutoModel:
    """Serves whole requests; ``serve`` returns prefix hits and what was evicted."""

    def __init__(self, size):
        self.size = size
        self.shadows = [Lru(size), Arc(size), Second(size)]
        self.scores, self.best, self.count = [0.0] * 3, 0, 0
        self.real, self.loose = [], []
        self.turns = []

    def serve(self, of_keys):
        hits = run(of_keys, self.real)
        for i, shadow in enumerate(self.shadows):
            self.scores[i] += run(of_keys, shadow.held())
            gone = shadow.use(of_keys)
            if i == self.best:
                self.loosen(gone)
        turned = self.look_at_the_scores()
        held = self.shadows[self.best].held()
        self.loose = [k for k in self.loose if k not in of_keys or k not in held]
        self.loosen(k for k in of_keys if k not in held)
        if turned:
            self.loosen(k for k in self.real if k not in held)
        new = [k for k in of_keys if k not in self.real and k in held]
        order = self.loose + [k for k in self.real if k not in self.loose]
        room = len(self.real) + len(new) - self.size
        gone = [k for k in order if k not in of_keys][: max(0, room)]
        self.real = [k for k in self.real if k not in gone] + new
        self.loose = [k for k in self.loose if k not in gone]
        renew(self.real, of_keys)
        return hits, gone

    def loosen(self, of_keys):
        self.loose += [k for k in of_keys if k in self.real and k not in self.loose]

    def look_at_the_scores(self):
        self.count += 1
        if self.count % 100:
            return False
        best = max(range(3), key=lambda i: (self.scores[i], -i))
        turned = self.scores[best] > self.scores[self.best] * 1.02 + 1
        if turned:
            self.best, self.loose = best, []
            self.turns.append(best)
        self.scores = [score * 0.9 for score in self.scores]
        return turned


def run(of_keys, held):
    num = 0
    while num < len(of_keys) and of_keys[num] in held:
        num += 1
    return num
