"""Keyed signatures of manifests: every writer of a run's folder can compute digests, but only a holder of the key can sign.

Source: HMAC, RFC 2104; SHA-256, FIPS 180-4. Free of torch.
"""

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastictrain.errors import ConfigError, Problem

LEAST_BYTES = 32


@dataclass(frozen=True, slots=True)
class SigningKey:
    """The secret of a run, from the environment variable `name`; never written to storage or logs."""

    name: str
    secret: bytes = field(repr=False)

    def sign(self, data: bytes, *, purpose: str) -> str:
        """HMAC-SHA-256 (64 hex digits). A signature for one purpose is not valid for another."""
        return hmac.new(self.secret, purpose.encode() + b"\0" + data, hashlib.sha256).hexdigest()

    def is_signed(self, data: bytes, signature: str, *, purpose: str) -> bool:
        return hmac.compare_digest(self.sign(data, purpose=purpose).encode(), signature.encode(errors="replace"))


def load_key(name: str, *, environ: Mapping[str, str] | None = None) -> SigningKey | None:
    """The secret in the environment variable `name`; None if `name` is empty.

    Raises: ValueError that completes the sentence "NAME OF A KEY OR OPTION ...".
    """
    if not name:
        return None
    value = (os.environ if environ is None else environ).get(name)
    must = f"must name an environment variable that holds a secret of at least {LEAST_BYTES} bytes"
    if value is None:
        raise ValueError(f"{must}, but {name} is not set")
    secret = os.fsencode(value)
    if len(secret) < LEAST_BYTES:
        raise ValueError(f"{must}, but {name} has {len(secret)}")
    return SigningKey(name, secret)


def signing_key(key_env: str) -> SigningKey | None:
    """The key of a run, whose `checkpoint.key_env` is given. Raises: ConfigError."""
    try:
        return load_key(key_env)
    except ValueError as error:
        raise ConfigError([Problem("checkpoint.key_env", str(error))]) from error


def proof_of(key: SigningKey | None) -> str:
    """A value that is equal for equal keys and does not reveal them; empty without a key."""
    return "" if key is None else key.sign(b"", purpose="elastictrain comparison of keys")
