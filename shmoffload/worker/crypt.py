"""One tenant's key: its file, what is derived from it, AES-GCM of one block.

Covers: reading the key file, the namespace of a key, encrypting and decrypting.
Does not cover: where the bytes lie (``bounce``), the record on the medium
(``wire.layout``).
Who calls it: ``bounce``, at the start (reads a file) and from I/O threads; ``doctor``
looks at the file. The library ``cryptography`` is imported for a tier that
has a key, and nowhere else.

::

    key file --+--> fingerprint --> namespace of the tier --> directory, headers
               +--> key of a block (namespace, offload key) --> AES-256-GCM
                    associated data: namespace, offload key, length

AES-GCM is safe for 2^32 random nonces under one key: at 1 GB/s of 128 KiB blocks six
days. So each block has a key of its own, which its rewrites alone use; deriving it
takes 4 us. AES-GCM-SIV would do without, but costs 2.4 CPU s/GB against 0.1 (measured,
OpenSSL 4.0). A nonce that is made of the block's bytes would need a hash that can be
trusted as much, for twice the CPU; nobody needs equal ciphertexts, since a disk tier
has one writer, and what is read meanwhile is whole either way.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import re
import shlex
import stat
from typing import Final

from shmoffload.errors import TierConfigError
from shmoffload.wire.layout import NAMESPACE_BYTES

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 8
_FINGERPRINT: Final = b"shmoffload 1 fingerprint"
_BLOCK: Final = b"shmoffload 1 block"
_NAMESPACE: Final = b"shmoffload 1 namespace"
_HEX: Final = re.compile(rb"[0-9A-Fa-f]{%d}" % (2 * KEY_BYTES))
_MAX_FILE_BYTES: Final = 2 * KEY_BYTES + 2  # hex digits and an end of line
_MAY_PASS: Final = frozenset(
    {errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.ESTALE}
)


def read_key(path: str) -> bytes:
    """Read a key file: 32 bytes, or 64 hex digits, this user's alone.

    Raises:
        TierConfigError: so it is not; with what to type.
        OSError: the system failed (EIO, EMFILE): may work later.
    """
    where = f"key_file = {_shown(path)}"
    make = f"make one with: (umask 077; openssl rand -hex 32 > {_typed(path)})"
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except FileNotFoundError as error:
        raise TierConfigError(f"{where} does not exist: {make}") from error
    except OSError as error:
        if error.errno in _MAY_PASS:
            raise
        what = f"cannot be read ({error.strerror})"
        if error.errno == errno.ELOOP:
            what = "is a symbolic link"
        raise TierConfigError(
            f"{where} {what}: give the path of a plain file that this user may read"
        ) from error
    try:
        _require_ours(os.fstat(fd), path, where)
        data = os.read(fd, _MAX_FILE_BYTES + 1)
    finally:
        os.close(fd)
    key = _decoded(data)
    if key is None:
        size = len(data) if len(data) <= _MAX_FILE_BYTES else "too many"
        raise TierConfigError(
            f"{where} holds {size} bytes that are no key: it has to be 32 random bytes "
            f"or 64 hex digits; {make}"
        )
    return key


def _require_ours(status: os.stat_result, path: str, where: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise TierConfigError(
            f"{where} is no plain file: give the path of one that this user may read"
        )
    if status.st_uid != os.geteuid():
        raise TierConfigError(
            f"{where} belongs to user {status.st_uid}, the tier runs as user "
            f"{os.geteuid()}: chown {os.geteuid()} {_typed(path)}"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise TierConfigError(
            f"{where} has mode {mode:04o}, others can reach the key: "
            f"chmod 600 {_typed(path)}"
        )


def _decoded(data: bytes) -> bytes | None:
    if len(data) == KEY_BYTES:
        # 32 letters are a password, or half of the hex digits; never random bytes.
        return None if data.isascii() and data.decode().isprintable() else data
    text = data.rstrip(b"\r\n")
    if not _HEX.fullmatch(text):  # fromhex alone passes over blanks
        return None
    return bytes.fromhex(text.decode("ascii"))


class Cipher:
    """Encrypts the blocks of one namespace with one tenant's key; any thread.

    Attributes:
        namespace: the key's own: another key, another namespace, and so a miss.
        fingerprint: names the key to people and gives nothing of it away.
    """

    def __init__(self, key: bytes, namespace: bytes) -> None:
        """Take a key.

        Args:
            key: 32 random bytes.
            namespace: of the configuration; a digest.

        Raises:
            TierConfigError: the library is not there.
        """
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            _ = AESGCM.encrypt_into  # since 47
        except (ImportError, AttributeError) as error:
            raise TierConfigError(
                "key_file needs the library cryptography, 47 or newer, in this "
                "environment: pip install 'shmoffload[encrypt]'"
            ) from error
        self._aes, self._invalid = AESGCM, InvalidTag
        self._key = key
        self.fingerprint = _derived(key, _FINGERPRINT)[:FINGERPRINT_BYTES].hex()
        digest = hashlib.sha256(_NAMESPACE + namespace + _derived(key, _FINGERPRINT))
        self.namespace = digest.digest()[:NAMESPACE_BYTES]

    def encrypt(self, key: bytes, payload: memoryview, out: memoryview) -> bytes:
        """Write ciphertext and, behind it, the tag; return the nonce.

        Args:
            key: of the block.
            payload: its bytes.
            out: ``TAG_BYTES`` longer.
        """
        nonce = os.urandom(NONCE_BYTES)
        bound = self._bound(key, len(payload))
        self._aes(self._block_key(key)).encrypt_into(nonce, payload, bound, out)
        return nonce

    def decrypt(
        self, key: bytes, nonce: bytes, sealed: memoryview, out: memoryview
    ) -> bool:
        """Write what was encrypted; False if this is not what was.

        Args:
            key: of the block.
            nonce: what ``encrypt`` returned.
            sealed: ciphertext and tag.
            out: undefined after False.
        """
        bound = self._bound(key, len(out))
        try:
            self._aes(self._block_key(key)).decrypt_into(nonce, sealed, bound, out)
        except self._invalid:
            return False
        return True

    def _block_key(self, key: bytes) -> bytes:
        return _derived(self._key, _BLOCK + self.namespace + key)

    def _bound(self, key: bytes, num_bytes: int) -> bytes:
        """Return what the tag speaks for besides the ciphertext."""
        return self.namespace + num_bytes.to_bytes(8, "little") + key


def _derived(key: bytes, info: bytes) -> bytes:
    """HKDF-Expand of RFC 5869 to 32 bytes; the key is random, so without Extract."""
    return hmac.digest(key, info + b"\x01", "sha256")


def _typed(path: str) -> str:
    """Return a path as a shell takes it."""
    return shlex.quote(_shown(path))


def _shown(path: str) -> str:
    """Return a path for a sentence, on one line."""
    return path if path.isprintable() else ascii(path)
