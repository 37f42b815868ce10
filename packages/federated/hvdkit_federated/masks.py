"""Keys, masks and shares of secrets, computed by `cryptography` and pycryptodome.

X25519 and HKDF-SHA256 for agreed keys, ChaCha20 for the expansion of masks, ChaCha20-Poly1305 for messages, Shamir's
scheme over GF(2**128), so a secret of 32 bytes is shared as two halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdkit.optional_import import optional_import
from hvdkit_federated.errors import FederatedError
from hvdkit_federated.quantise import Words

SECRET_BYTES = 32
_HALF = SECRET_BYTES // 2
_EXTRA = "secure", "hvdkit-federated"


def _primitives(module: str) -> Any:
    return optional_import(f"cryptography.hazmat.primitives.{module}", *_EXTRA)


def check_installed() -> None:
    """Raise MissingDependencyError unless both packages are installed."""
    _primitives("asymmetric.x25519")
    optional_import("Crypto.Protocol.SecretSharing", *_EXTRA)


class KeyPair:
    """An X25519 key: a new one, or the key of 32 secret bytes."""

    def __init__(self, secret: bytes | None = None) -> None:
        private = _primitives("asymmetric.x25519").X25519PrivateKey
        self._key = private.generate() if secret is None else private.from_private_bytes(secret)
        self.public: bytes = self._key.public_key().public_bytes_raw()

    @property
    def secret(self) -> bytes:
        """The secret, 32 bytes."""
        return bytes(self._key.private_bytes_raw())

    def agree(self, public: bytes, purpose: str) -> bytes:
        """Agree on a key of 32 bytes with the owner of `public`. purpose: gives different keys for one pair."""
        shared = self._key.exchange(_primitives("asymmetric.x25519").X25519PublicKey.from_public_bytes(public))
        derive = _primitives("kdf.hkdf").HKDF
        algorithm = _primitives("hashes").SHA256()
        return bytes(
            derive(algorithm=algorithm, length=32, salt=None, info=f"hvdkit {purpose}".encode()).derive(shared)
        )


def expand(key: bytes, count: int, dtype: np.dtype[Any]) -> Words:
    """Expand a key of 32 bytes, which must have no other use, to `count` words of its keystream."""
    ciphers = _primitives("ciphers")
    encryptor = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(count * dtype.itemsize)), dtype.newbyteorder("<")).astype(dtype)


def seal(key: bytes, message: bytes) -> bytes:
    """Encrypt a message. A key is for one message only."""
    return bytes(_primitives("ciphers.aead").ChaCha20Poly1305(key).encrypt(bytes(12), message, None))


def unseal(key: bytes, sealed: bytes) -> bytes:
    """Decrypt; FederatedError if it was encrypted with another key, or changed."""
    try:
        return bytes(_primitives("ciphers.aead").ChaCha20Poly1305(key).decrypt(bytes(12), sealed, None))
    except optional_import("cryptography.exceptions", *_EXTRA).InvalidTag:
        raise FederatedError("A share of a key arrived changed, or was made for another client.") from None


def split_secret(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Split a secret of 32 bytes into `count` shares of 32 bytes each; any `threshold` of them restore it."""
    shamir = optional_import("Crypto.Protocol.SecretSharing", *_EXTRA).Shamir
    halves = [shamir.split(threshold, count, half) for half in (secret[:_HALF], secret[_HALF:])]
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def join_secret(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Restore a secret from shares, by their index in split_secret()'s list; FederatedError if they are too few."""
    if len(shares) < threshold:
        raise FederatedError(f"{len(shares)} shares of a secret arrived, but {threshold} are needed to recover it.")
    shamir = optional_import("Crypto.Protocol.SecretSharing", *_EXTRA).Shamir
    used = sorted(shares.items())[:threshold]
    return bytes(b"".join(shamir.combine([(at + 1, share[part]) for at, share in used]) for part in _PARTS))


_PARTS = (slice(0, _HALF), slice(_HALF, SECRET_BYTES))
