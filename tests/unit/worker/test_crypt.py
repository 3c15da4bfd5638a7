"""A key file is this user's alone; a cipher gives back what it took, or nothing."""

import errno
import os
import random
import subprocess
import sys

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from hypothesis import given
from hypothesis import strategies as st

from shmoffload.errors import TierConfigError
from shmoffload.testing.tier_tests import key_of
from shmoffload.wire.layout import (
    HEADER_BYTES,
    PAGE_BYTES,
    namespace_digest,
    open_cipher,
    seal_cipher,
)
from shmoffload.worker import crypt
from shmoffload.worker.crypt import KEY_BYTES, TAG_BYTES, Cipher, read_key

KEY = random.Random(1).randbytes(KEY_BYTES)
NAMESPACE = namespace_digest("model")


def write(path, data, mode=0o600):
    path.write_bytes(data)
    path.chmod(mode)
    return path


def refusal(path):
    with pytest.raises(TierConfigError) as caught:
        read_key(str(path))
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert text.startswith(f"key_file = {path} ")
    assert "\n" not in text
    assert KEY.hex() not in text
    return text


# The file ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o400])
@pytest.mark.parametrize(
    "data", [KEY, KEY.hex().encode(), KEY.hex().upper().encode(), f"{KEY.hex()}\n"]
)
def test_key_is_bytes_or_hex_digits(tmp_path, data, mode):
    data = data.encode() if isinstance(data, str) else data
    assert read_key(str(write(tmp_path / "key", data, mode))) == KEY


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o620, 0o601])
def test_key_that_others_can_reach(tmp_path, mode):
    path = write(tmp_path / "key", KEY, mode)
    text = refusal(path)
    assert f"has mode {mode:04o}" in text
    assert text.endswith(f"chmod 600 {path}")


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (b"", "0"),
        (b"secret", "6"),
        (KEY[1:], "31"),
        (b"correct horse battery staple 123", "32"),
        (KEY.hex().encode()[:32], "32"),
        (KEY + b"\n", "33"),
        (b"g" * 64, "64"),
        (b" " * 64, "64"),
        (b"ab " * 16 + b"ab" * 8, "64"),
        ("é".encode() * 32, "64"),
        (KEY * 1000, "too many"),
    ],
)
def test_what_is_no_key(tmp_path, data, size):
    text = refusal(write(tmp_path / "key", data))
    assert f"holds {size} bytes that are no key" in text
    assert "openssl rand -hex 32 >" in text


def test_no_file_says_how_to_make_one(tmp_path):
    path = tmp_path / "key"
    text = refusal(path)
    assert "does not exist" in text
    command = text.partition("make one with: ")[2]
    subprocess.run(["sh", "-c", command], check=True, timeout=60)
    assert len(read_key(str(path))) == KEY_BYTES
    assert path.stat().st_mode & 0o777 == 0o600


def test_link_directory_and_pipe_are_refused(tmp_path):
    key = write(tmp_path / "key", KEY)
    link = tmp_path / "link"
    link.symlink_to(key)
    assert "is a symbolic link" in refusal(link)
    assert "is no plain file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "is no plain file" in refusal(tmp_path / "pipe")
    assert "cannot be read (Not a directory)" in refusal(key / "below")


def test_somebody_elses_key_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "key", KEY)
    mine = os.geteuid()
    monkeypatch.setattr(crypt.os, "geteuid", lambda: mine + 1)
    text = refusal(path)
    assert f"belongs to user {mine}, the tier runs as user {mine + 1}" in text


def test_trouble_that_passes_is_not_the_configurations_fault(tmp_path, monkeypatch):
    def fail(*_words):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(crypt.os, "open", fail)
    with pytest.raises(OSError, match="Too many"):
        read_key(str(tmp_path))


# The cipher ----------------------------------------------------------------------


def encrypted(cipher, key, payload):
    out = bytearray(len(payload) + TAG_BYTES)
    nonce = cipher.encrypt(key, memoryview(payload), memoryview(out))
    return nonce, out


def decrypted(cipher, key, nonce, sealed):
    out = bytearray(len(sealed) - TAG_BYTES)
    is_right = cipher.decrypt(key, nonce, memoryview(sealed), memoryview(out))
    return bytes(out) if is_right else None


@given(payload=st.binary(min_size=1, max_size=300), number=st.integers(0, 5))
def test_only_the_same_block_of_the_same_key_comes_back(payload, number):
    cipher, key = Cipher(KEY, NAMESPACE), key_of(number)
    nonce, sealed = encrypted(cipher, key, payload)
    assert decrypted(cipher, key, nonce, sealed) == payload
    assert decrypted(cipher, key_of(9), nonce, sealed) is None
    assert decrypted(cipher, key, bytes(12), sealed) is None
    assert decrypted(cipher, key, nonce, sealed + b"\0") is None
    assert decrypted(Cipher(KEY[::-1], NAMESPACE), key, nonce, sealed) is None
    other = Cipher(KEY, namespace_digest("another model"))
    assert decrypted(other, key, nonce, sealed) is None


@given(at=st.integers(0, 8 * (100 + TAG_BYTES) - 1))
def test_every_flipped_bit_is_noticed(at):
    cipher, key = Cipher(KEY, NAMESPACE), key_of(0)
    nonce, sealed = encrypted(cipher, key, bytes(100))
    sealed[at // 8] ^= 1 << at % 8
    assert decrypted(cipher, key, nonce, sealed) is None


def test_length_and_name_cannot_be_traded():
    """``k`` + 1 byte more of name must not read as another split of the same bytes."""
    cipher = Cipher(KEY, NAMESPACE)
    nonce, sealed = encrypted(cipher, b"name1", bytes(64))
    assert decrypted(cipher, b"name", nonce, sealed) is None


def test_no_nonce_and_no_ciphertext_comes_twice():
    cipher, payload = Cipher(KEY, NAMESPACE), bytes(64)
    seen = [encrypted(cipher, key_of(0), payload) for _ in range(1000)]
    assert len({nonce for nonce, _ in seen}) == 1000
    assert len({bytes(sealed) for _, sealed in seen}) == 1000


def test_a_key_has_a_namespace_and_a_fingerprint_of_its_own():
    one, two = Cipher(KEY, NAMESPACE), Cipher(KEY[::-1], NAMESPACE)
    assert len({one.namespace, two.namespace, NAMESPACE}) == 3
    assert Cipher(KEY, NAMESPACE).namespace == one.namespace
    assert Cipher(KEY, namespace_digest("b")).namespace != one.namespace
    assert one.fingerprint != two.fingerprint
    for part in (one.namespace.hex(), one.fingerprint):
        assert part not in KEY.hex()


@given(key=st.binary(min_size=32, max_size=32), info=st.binary(max_size=80))
def test_derivation_is_that_of_the_rfc(key, info):
    theirs = HKDFExpand(algorithm=SHA256(), length=32, info=info).derive(key)
    assert crypt._derived(key, info) == theirs


def test_what_is_on_disks_stays_readable():
    """Other words for the same key would make every old block a miss."""
    cipher = Cipher(bytes(range(32)), bytes(16))
    assert cipher.fingerprint == "471c7bc15468e476"
    assert cipher.namespace.hex() == "ca296dc26a79cb6336d3a3eab08f2c75"
    block_key = cipher._block_key(b"key")
    assert block_key.hex() == (
        "50c1a3f09a440d7aae284d17c6f83f59d36662ebfa1a1ddbcecbeb8c6bd34ec9"
    )
    nonce, sealed = encrypted(cipher, b"key", b"payload")
    told = cipher.namespace + (7).to_bytes(8, "little") + b"key"
    assert AESGCM(block_key).decrypt(nonce, bytes(sealed), told) == b"payload"
    with pytest.raises(InvalidTag):
        AESGCM(block_key).decrypt(nonce, bytes(sealed), b"")


def test_without_the_library_one_sentence(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None
    )
    with pytest.raises(TierConfigError, match=r"pip install 'shmoffload\[encrypt\]'"):
        Cipher(KEY, NAMESPACE)


def test_library_that_is_too_old(monkeypatch):
    from cryptography.hazmat.primitives.ciphers import aead

    monkeypatch.setattr(aead, "AESGCM", object)
    with pytest.raises(TierConfigError, match="cryptography, 47 or newer"):
        Cipher(KEY, NAMESPACE)


# The record ----------------------------------------------------------------------


@given(
    nonce=st.binary(min_size=12, max_size=12), tag=st.binary(min_size=16, max_size=16)
)
def test_record_behind_the_header(nonce, tag):
    record = seal_cipher(nonce, tag)
    page = bytes(HEADER_BYTES) + record
    page += bytes(PAGE_BYTES - len(page))
    assert open_cipher(page) == open_cipher(memoryview(page)) == (nonce, tag)
    for at in range(len(record)):
        spoiled = bytearray(page)
        spoiled[HEADER_BYTES + at] ^= 4
        assert open_cipher(bytes(spoiled)) is None


def test_no_record_in_a_plain_page():
    assert open_cipher(bytes(PAGE_BYTES)) is None
    assert open_cipher(b"") is None
