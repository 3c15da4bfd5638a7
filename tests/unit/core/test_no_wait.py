"""No public call waits, whatever the tiers do (INV-31)."""

import gc
import resource
import time

from manager_kit import Rig, keys, make_mailbox

from shmoffload.core.types import Residency, ScheduleEndContext

NUM_KEYS, MAX_CPU_S = 1000, 5e-3
MAX_ROUNDS = 25  # a neighbour on the machine makes a call dearer, none makes it cheaper


def measured(call):
    """Voluntary context switches and own CPU time of one call."""
    switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    began_s = time.thread_time()
    call()
    cpu_s = time.thread_time() - began_s
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - switches, cpu_s


def calls_of_a_step(rig, names, tier_keys):
    """Every call with 1,000 keys; the tier's worker never says a word."""
    manager, a, b = rig.manager, rig.contexts["a"], rig.contexts["b"]

    def look(of_keys, ctx):
        for k in of_keys:
            manager.lookup(k, ctx)

    yield "prepare_store", lambda: manager.prepare_store(names, a)
    yield "complete_store", lambda: manager.complete_store(names, a)
    yield "lookup, hit", lambda: look(names, b)
    yield "prepare_load", lambda: manager.prepare_load(names, b)
    yield "complete_load", lambda: manager.complete_load(names, b)
    yield "lookup, promoted", lambda: look(tier_keys, b)
    yield "on_schedule_end", lambda: manager.on_schedule_end(ScheduleEndContext())
    yield "lookup, waiting", lambda: look(tier_keys, b)
    yield "advance", lambda: manager.advance(1.0)
    yield "on_request_finished", lambda: manager.on_request_finished(a)
    yield "reset_cache", manager.reset_cache
    yield "on_reset_flushed", manager.on_reset_flushed


def test_no_call_waits_or_takes_long():
    names, tier_keys = keys(*range(NUM_KEYS)), keys(*range(5000, 5000 + NUM_KEYS))
    cpu_s = {}
    gc.freeze()  # what other tests have left is not this manager's to look through
    for _ in range(MAX_ROUNDS):
        tier = make_mailbox(credit_blocks=10 * NUM_KEYS)
        tier.feed([Residency(1, added=tier_keys)])
        rig = Rig(3 * NUM_KEYS, tiers=[tier])
        rig.new("a", *range(NUM_KEYS))
        rig.new("b")
        for name, call in calls_of_a_step(rig, names, tier_keys):
            switches, spent_s = measured(call)
            assert switches == 0, f"{name} has waited"
            cpu_s[name] = min(spent_s, cpu_s.get(name, spent_s))
        slow = {name: s for name, s in cpu_s.items() if s > MAX_CPU_S}
        if not slow:
            break
    gc.unfreeze()
    assert not slow
