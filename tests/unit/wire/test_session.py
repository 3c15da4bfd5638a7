"""The session page: create, join, look; words and texts."""

import errno
import os

import pytest

from shmoffload.errors import NoSessionError, RegionTooSmallError, StartError
from shmoffload.wire import names
from shmoffload.wire.config import from_dict
from shmoffload.wire.session import SessionPage, TierState, TierWord, Word


def config_of(session, *tiers):
    return from_dict(
        {
            "session": {"name": session},
            "primary": {"slots": 2, "block_bytes": 4096},
            "tier": [{"type": "memory", "name": name} for name in tiers],
        }
    )


@pytest.fixture
def page(session_name):
    opened = SessionPage.open_or_create(config_of(session_name, "a", "b"))
    yield opened
    opened.unlink(session_name)
    opened.close()


def test_what_one_process_writes_another_reads(page, session_name):
    page.set(Word.STEPS, (1 << 64) - 1)
    page.set_tier(1, TierWord.STATE, TierState.UP)
    page.add_tier(1, TierWord.HITS, 3)
    page.add_tier(1, TierWord.HITS, 4)
    joined = SessionPage.open_or_create(config_of(session_name, "a", "b"))
    seen = SessionPage.look(session_name)
    received = SessionPage.from_fd(os.dup(page.fd))
    for other in (joined, seen, received):
        assert other.session == session_name
        assert other.num_tiers == 2
        assert other.tier_name(1) == ("b", "memory")
        assert other.get(Word.STEPS) == (1 << 64) - 1
        assert other.get_tier(1, TierWord.STATE) == TierState.UP
        assert other.get_tier(1, TierWord.HITS) == 7
        assert other.get_tier(0, TierWord.HITS) == 0
        other.close()
        other.close()


def test_look_can_not_write(page, session_name):
    seen = SessionPage.look(session_name)
    with pytest.raises(TypeError):
        seen.set(Word.STEPS, 1)
    seen.close()


def test_every_word_has_its_own_place(page):
    words = {page.tier_base(i) + word for i in range(2) for word in TierWord}
    assert len(words) == 2 * len(TierWord)
    assert not words & set(Word)
    assert max(words) < len(page.words)


def test_tier_error_is_text_of_any_length(page):
    assert page.tier_error(0) == ""
    page.set_tier_error(0, "disk broke: " + "é" * 500)
    assert page.tier_error(0).startswith("disk broke: ééé")
    page.set_tier_error(0, "short")
    assert page.tier_error(0) == "short"
    assert page.tier_error(1) == ""
    page.add_tier(0, TierWord.TEXT_SEQ, 1)  # a writer is midway
    assert page.tier_error(0) == ""


@pytest.mark.parametrize("tiers", [("a",), ("a", "c"), ("a", "b", "c")])
def test_live_page_with_other_tiers_is_refused(page, session_name, tiers):
    with pytest.raises(StartError, match="in use with other tiers"):
        SessionPage.open_or_create(config_of(session_name, *tiers))
    assert page.tier_name(1) == ("b", "memory")


@pytest.mark.parametrize("tiers", [("a", "b"), ("x", "y"), ("x",)])
def test_page_of_a_dead_session_is_made_anew(session_name, tiers):
    dead = SessionPage.open_or_create(config_of(session_name, "a", "b"))
    dead.set(Word.STEPS, 5)
    dead.close()
    fresh = SessionPage.open_or_create(config_of(session_name, *tiers))
    assert fresh.get(Word.STEPS) == 0
    assert fresh.tier_name(0) == (tiers[0], "memory")
    fresh.unlink(session_name)
    fresh.close()


def test_start_that_hangs_is_named(session_name):
    fd = names.open_name(names.page_name(session_name))
    assert names.try_lock(fd, exclusive=True)
    with pytest.raises(StartError, match="in use by a start that hangs"):
        SessionPage.open_or_create(config_of(session_name))
    assert names.unlink_same(names.page_name(session_name), fd)
    os.close(fd)


def test_look_without_a_page(session_name):
    with pytest.raises(NoSessionError, match=f'no session "{session_name}" is live'):
        SessionPage.look(session_name)
    os.close(names.open_name(names.page_name(session_name)))
    with pytest.raises(NoSessionError, match="only now being made"):
        SessionPage.look(session_name)
    names.sweep(session_name)


def test_full_memory_is_a_sentence_and_leaves_no_name(session_name, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        RegionTooSmallError, match=r"bytes free .* a session page needs"
    ):
        SessionPage.open_or_create(config_of(session_name))
    assert not os.path.exists(names.SHM_DIR + names.page_name(session_name))
