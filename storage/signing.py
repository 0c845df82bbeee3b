"""Signatures of manifests and promotion records: write access to the bucket is not enough to forge a score.

HERD_SIGNING_KEY names a file with an Ed25519 private key (PEM), HERD_TRUSTED_KEYS files with public keys, separated by
colons. If either is set, documents without a signature by one of these keys are refused. To revoke a leaked key, remove
it from the trusted keys and sign its artifacts again.
"""

from __future__ import annotations

import base64
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNING, TRUSTED = "HERD_SIGNING_KEY", "HERD_TRUSTED_KEYS"
OTHERS = 0o077
"""Permission bits of group and others."""
_PUBLIC = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)


def sign(what: str, digest: str) -> str:
    """Return the signature of a document of kind `what` with that SHA-256, empty if no key is configured.

    Raises ValueError for an unusable key, and if there are trusted keys but no signing key.
    """
    key = _signing_key(os.environ.get(SIGNING, ""))
    if key is None and os.environ.get(TRUSTED):
        raise ValueError(f"{SIGNING}: is not set, but {TRUSTED} is, so artifacts made here would be refused; set both")
    return base64.b64encode(key.sign(_message(what, digest))).decode() if key else ""


def signature_error(what: str, digest: str, signature: str) -> str:
    """Return why a document is refused; empty if a trusted key signed it, or no key is configured.

    Raises ValueError for an unusable key.
    """
    keys = _trusted_keys(os.environ.get(SIGNING, ""), os.environ.get(TRUSTED, ""))
    if not keys:
        return ""
    if not signature:
        return f"is not signed, but {SIGNING} or {TRUSTED} requires it; if it is yours, sign it: herd verify --sign"
    from cryptography.exceptions import InvalidSignature

    for key in keys:
        try:
            key.verify(base64.b64decode(signature), _message(what, digest))
        except (InvalidSignature, ValueError):
            continue
        return ""
    return f"is signed by none of the {len(keys)} keys of {SIGNING} and {TRUSTED}; do not use it"


def _message(what: str, digest: str) -> bytes:
    return f"herd {what}\n{digest}\n".encode()


@lru_cache(8)
def _signing_key(path: str) -> Ed25519PrivateKey | None:
    if not path:
        return None
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    remedy = "make one: openssl genpkey -algorithm ed25519 -out FILE; chmod 600 FILE"
    try:
        file = Path(path).expanduser()
        if file.stat().st_mode & OTHERS:
            raise ValueError("others can read it; chmod 600 FILE")
        key = load_pem_private_key(file.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{SIGNING}: {path}: cannot be used ({error}); {remedy}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{SIGNING}: {path}: is not an Ed25519 key; {remedy}")
    return key


@lru_cache(8)
def _trusted_keys(signing: str, paths: str) -> tuple[Ed25519PublicKey, ...]:
    if not signing and not paths:
        return ()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    own = _signing_key(signing)
    trusted = [own.public_key()] if own else []
    for path in filter(None, paths.split(os.pathsep)):
        try:
            keys = [load_pem_public_key(text) for text in _PUBLIC.findall(Path(path).expanduser().read_bytes())]
        except (OSError, ValueError) as error:
            raise ValueError(f"{TRUSTED}: {path}: cannot be used ({error})") from None
        ed25519 = [key for key in keys if isinstance(key, Ed25519PublicKey)]
        if not ed25519 or len(ed25519) != len(keys):
            raise ValueError(
                f"{TRUSTED}: {path}: is not a file of Ed25519 public keys; "
                f"write: openssl pkey -in KEY -pubout -out {path}"
            )
        trusted += ed25519
    return tuple(trusted)
