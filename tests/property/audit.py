"""The equations of semantics.md 14, by an observer who believes no counter.

Covers: slots, pins, owners, open work, from the blocks themselves and from what
the world knows to be open.
Does not cover: what only a call can show (the rules of ``test_manager_machine``).
Who calls it: the manager's state machine, after every rule.

Every assertion names the invariant that is broken.
"""

PENDING, READY = 1, 2


def audit(world):
    """Compare a manager with its world; see ``ManagerWorld`` for the fields."""
    for tier in world.tiers:
        assert not tier.faults, tier.faults[0]
    table = world.manager.table
    blocks = table.blocks
    _audit_slots(world, table)
    ready = {k for k, b in blocks.items() if b.state == READY}
    for key in ready:
        slot = blocks[key].slot
        assert world.memory[slot] == key, f"INV-37: {key} is not in its slot"
    _audit_pins(world, blocks)
    _audit_owners(world, blocks)
    _audit_requests(world)
    world.replay_events()
    assert world.mirror == ready, "INV-12: events tell another story"
    assert world.told <= ready, "INV-21: a HIT did not last until the step's end"


def _audit_slots(world, table):
    blocks = list(table.blocks.values())
    slots = [block.slot for block in blocks]
    assert len(set(slots)) == len(slots), "INV-1: a slot has two blocks"
    assert set(slots) <= set(range(table.num_slots)), "INV-1: no such slot"
    held = world.quarantined_slots()
    assert len(held) == table.num_quarantined, (
        f"INV-34: {len(held)} slots are under work that lost its meaning, "
        f"{table.num_quarantined} are quarantined"
    )
    assert not held & set(slots), "INV-34: a quarantined slot was handed out"
    num = len(blocks) + table.num_free + table.num_quarantined
    assert num == table.num_slots, "INV-2: slots are lost, or counted twice"
    assert all(b.state in (PENDING, READY) and b.pins >= 0 for b in blocks), "INV-3"
    pending = [block for block in blocks if block.state == PENDING]
    assert len(pending) == table.num_pending, "INV-3: the PENDING counter"
    assert not any(block.pins for block in pending), "INV-3: PENDING and pinned"


def _audit_pins(world, blocks):
    expected = dict.fromkeys(blocks, 0)
    for keys in world.open_reads():
        for key in keys:
            expected[key] += 1
    for key, block in blocks.items():
        assert block.pins == expected[key], (
            f"INV-4: {key} has {block.pins} pins for {expected[key]} readers"
        )


def _audit_owners(world, blocks):
    stored = [key for _, slots in world.stores for key in slots]
    loaded = [key for job in world.live_loads() for key in job.keys]
    queued = [block.key for block in world.manager._promotions.queue]
    owned = [*stored, *loaded, *queued]
    for promotion in world.manager._promotions.queue.values():
        owner = promotion.request.ctx.req_id
        assert owner in world.requests, "INV-26: queued for a finished request"
    assert len(set(owned)) == len(owned), "INV-5: two owners; INV-19: two promotions"
    pending = {key for key, block in blocks.items() if block.state == PENDING}
    assert pending == set(owned), "INV-5: PENDING without an owner, or none for one"


def _audit_requests(world):
    manager = world.manager
    parked = {}
    for block in manager.table.blocks.values():
        for request in block.waiters or ():
            parked[request.ctx.req_id] = parked.get(request.ctx.req_id, 0) + 1
    open_work = {}
    for ctx, _ in world.stores:
        open_work[ctx.req_id] = open_work.get(ctx.req_id, 0) + 1
    for req_id, num in parked.items():
        open_work[req_id] = open_work.get(req_id, 0) + num
    live = {req_id: r.open_work for req_id, r in manager._requests.items()}
    closing = {req_id: r.open_work for req_id, r in manager._closing.items()}
    for req_id, num in (live | closing).items():
        assert num == open_work.get(req_id, 0), f"INV-28: open work of {req_id}: {num}"
    assert set(live) == set(world.requests), "INV-27: who is alive"
    still_open = set(open_work) - set(world.requests)
    assert set(closing) == still_open, "INV-27: finished, tracked and nothing open"
    for tier in world.tiers:
        assert tier.live == set(live) | still_open, "INV-26: who was told of the end"
    asking = {
        req_id: [t for t in world.tiers if t.policy.value == "request_level"]
        for req_id in live | closing
    }
    asking = {req_id: tiers for req_id, tiers in asking.items() if tiers}
    assert manager._request_level_tiers == asking, "INV-25: who asked"
    waited_for = bool(
        world.live_loads() or manager._promotions.queue or parked or still_open
    )
    assert manager.has_pending_work() is waited_for, "INV-38: what keeps us stepping"
