"""Which documents are held out of training: decided by a hash of the text and by nothing else.

So the decision does not move when other documents come or go, and one text has one fate in every domain. It is taken
after duplicates are gone: no near copy of a held-out document stays behind in the training set of its domain. The id
comes from the same pass over the text, since hashing is among the dearest parts of reading (about 1 us per kilobyte).
"""

from __future__ import annotations

from fractions import Fraction
from hashlib import blake2b
from typing import Any


def draw_and_id(text: Any, domain: bytes) -> tuple[int, str]:
    """Return the draw of a text in UTF-8 (bytes or a view of them) and its id in `domain`, 32 hex digits of BLAKE2b."""
    digest = blake2b(text, digest_size=32, person=b"herd text").digest()
    return int.from_bytes(digest[:8], "little"), blake2b(digest, digest_size=16, key=domain).hexdigest()


def draw(text: str) -> int:
    """Return a number in [0, 2^64) that only `text` decides."""
    return draw_and_id(text.encode(), b"")[0]


def document_id(text: str, domain: str) -> str:
    """Return the id of a text in a domain: equal texts of a domain have equal ids."""
    return draw_and_id(text.encode(), domain.encode())[1]


def threshold(share: Fraction) -> int:
    """Return the bound below which a draw is held out, at most 2^64 - 1 so that it fits 64 bits."""
    return min(2**64 * share.numerator // share.denominator, 2**64 - 1)
