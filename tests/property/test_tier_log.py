"""What a mirror is told of a tier, in pieces, in every order of changes (INV-12)."""

from hypothesis import given
from hypothesis import strategies as st

from shmoffload.core.tier_events import TierLog

some = st.frozensets(st.integers(0, 9))
changes = st.lists(
    st.one_of(
        st.tuples(st.just("note"), some, some),
        st.tuples(st.just("replace"), some),
        st.tuples(st.just("restart")),
        st.tuples(st.just("take"), st.integers(1, 4)),
    ),
    max_size=40,
)


def follow(log, mirror, max_keys):
    num_keys = 0
    for event in log.take(max_keys):
        keys = set(event.keys)
        num_keys += len(event.keys)
        assert keys
        assert len(keys) == len(event.keys)
        if event.is_removed:
            assert keys <= mirror, "INV-12: removed, but never stored"
            mirror -= keys
        else:
            assert not keys & mirror, "INV-12: stored twice"
            mirror |= keys
    return num_keys


@given(changes)
def test_a_mirror_ends_with_what_is_there(todo):
    log, resident, mirror = TierLog(), set(), set()
    for kind, *with_ in todo:
        if kind == "note":
            added, removed = with_
            resident = (resident | added) - removed
            log.note([*added, *removed], resident)
        elif kind == "replace":
            resident = set(with_[0])
            log.replace(resident)
        elif kind == "restart":
            mirror = set()
            log.restart(resident)
        else:
            assert follow(log, mirror, with_[0]) <= with_[0]
        assert log.num_waiting == len(mirror ^ resident)
    while log.num_waiting:
        assert follow(log, mirror, 3) > 0
    assert mirror == resident
    assert log.take() == []
