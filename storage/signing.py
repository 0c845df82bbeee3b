"""Signatures of manifests and promotion records, so that who can write the bucket cannot forge a score or a champion.

HERD_SIGNING_KEY names a file with an Ed25519 private key (PEM), HERD_TRUSTED_KEYS files with public keys, separated by
colons. With either, what is not signed by one of these keys is refused; with neither, digests alone are looked at.
What this gives up: a key that leaked is taken out of the trusted ones by hand, and its artifacts are signed again.
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
_PUBLIC = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)


def signed(what: str, digest: str) -> str:
    """Return the signature of the document of kind `what` with that SHA-256, empty if no key is configured.

    Raises ValueError for a key that cannot be used, and where keys are trusted and there is none to sign with.
    """
    key = _signing_key(os.environ.get(SIGNING, ""))
    if key is None and os.environ.get(TRUSTED):
        raise ValueError(f"{SIGNING}: is not set, but {TRUSTED} is, so what is made here would be refused; set both")
    return base64.b64encode(key.sign(_message(what, digest))).decode() if key else ""


def distrust(what: str, digest: str, signature: str) -> str:
    """Return why a document is not to be believed; empty if a trusted key signed it, or none is configured.

    Raises ValueError for a key that cannot be used.
    """
    keys = _trusted_keys(os.environ.get(SIGNING, ""), os.environ.get(TRUSTED, ""))
    if not keys:
        return ""
    if not signature:
        return f"is not signed, and {SIGNING} or {TRUSTED} asks for it; if it is yours, sign it: herd verify --sign"
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
def _signing_key(place: str) -> Ed25519PrivateKey | None:
    if not place:
        return None
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    remedy = "make one: openssl genpkey -algorithm ed25519 -out FILE; chmod 600 FILE"
    try:
        path = Path(place).expanduser()
        if path.stat().st_mode & OTHERS:
            raise ValueError("others can read it; chmod 600 FILE")
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{SIGNING}: {place}: cannot be used ({error}); {remedy}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{SIGNING}: {place}: is no Ed25519 key; {remedy}")
    return key


@lru_cache(8)
def _trusted_keys(signing: str, places: str) -> tuple[Ed25519PublicKey, ...]:
    own = _signing_key(signing)
    found = [own.public_key()] if own else []
    for place in filter(None, places.split(os.pathsep)):
        found += _public_keys(place)
    return tuple(found)


def _public_keys(place: str) -> list[Ed25519PublicKey]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        keys = [load_pem_public_key(text) for text in _PUBLIC.findall(Path(place).expanduser().read_bytes())]
    except (OSError, ValueError) as error:
        raise ValueError(f"{TRUSTED}: {place}: cannot be used ({error})") from None
    fitting = [key for key in keys if isinstance(key, Ed25519PublicKey)]
    if not fitting or len(fitting) != len(keys):
        raise ValueError(
            f"{TRUSTED}: {place}: is no file of Ed25519 public keys; write: openssl pkey -in KEY -pubout -out {place}"
        )
    return fitting
