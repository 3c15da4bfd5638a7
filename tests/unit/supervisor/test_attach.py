"""Who is served: peers, configurations, pages."""

import os
import socket

import pytest

from shmoffload.supervisor.attach import check_attach, differing_key, map_page
from shmoffload.supervisor.loop import Supervisor
from shmoffload.supervisor.peer import peer_of, peer_pidfd
from shmoffload.wire.config import encode, from_dict
from shmoffload.wire.messages import PROTOCOL_VERSION, Attach


def config(**changes):
    raw = {
        "session": {"name": "s"},
        "primary": {"block_bytes": "64KiB", "slots": 4},
        "tier": [{"type": "memory", "max_bytes": "1MiB"}],
        **changes,
    }
    return from_dict(raw)


def attach(packed=None, *, session="s", version=PROTOCOL_VERSION):
    return Attach(version, session, 1, encode(config()) if packed is None else packed)


def test_equal_configurations_in_other_words():
    same = config(primary={"block_bytes": 65536, "slots": 4})
    assert differing_key(config(), same) == ""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tier": []}, "tier.0.type is memory for the daemon and None for"),
        ({"limits": {"heartbeat_s": 2.0}}, "limits.heartbeat_s is 1.0"),
        ({"tier": [{"type": "memory", "max_bytes": "2MiB"}]}, "tier.0.max_bytes"),
    ],
)
def test_differing_key_is_named(changes, text):
    assert text in differing_key(config(), config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"primary": {"block_bytes": 65536, "slots": 5}},
        {"session": {"name": "s", "namespace": "an adapter computed it"}},
        {"limits": {"credit_bytes": "1GiB", "job_deadline_s": 5.0}},
    ],
)
def test_what_the_engine_says_may_differ(changes):
    assert differing_key(config(), config(**changes)) == ""


def test_attach_in_order():
    assert check_attach(attach(), session="s", config=None) == ""
    assert check_attach(attach(), session="s", config=config()) == ""


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (attach(version=2), "protocol 2"),
        (attach(session="other"), 'session "s", not "other"'),
        (attach(b"garbage"), "garbage"),
        (attach(b"[]"), "garbage"),
        (attach(encode(config(session={"name": "x"}))), "session.name"),
    ],
)
def test_attach_is_refused_with_a_sentence(message, text):
    assert text in check_attach(message, session="s", config=None)


@pytest.mark.parametrize("size", [0, 100, 8192])
def test_a_page_that_is_none(size):
    fd = os.memfd_create("no-page")
    os.truncate(fd, size)
    assert map_page(fd, config()) is None
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_peer_is_the_process_that_made_the_pair():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        assert peer_of(left) == (os.getpid(), os.geteuid())
        pidfd = peer_pidfd(left)
        assert not os.get_inheritable(pidfd)
        os.close(pidfd)


def test_stranger_is_not_listened_to():
    supervisor = Supervisor("s")
    assert supervisor._stranger(os.geteuid()) == ""
    assert f"of user {os.geteuid() + 1}" in supervisor._stranger(os.geteuid() + 1)


def test_connections_are_bounded():
    supervisor = Supervisor("s")
    supervisor._connections = [None] * 16
    assert "16 are open already" in supervisor._stranger(os.geteuid())
