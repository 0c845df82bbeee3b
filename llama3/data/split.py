"""Which documents are held out of training: decided by a hash of the text and by nothing else.

So the decision does not move when other documents come or go, and one text has one fate in every domain. It is taken
after duplicates are gone: no near copy of a held-out document stays behind in the training set of its domain.
"""

from __future__ import annotations

from fractions import Fraction
from hashlib import blake2b

HELD_OUT = "held_out"
TRAIN = "train"


def draw(text: str) -> int:
    """Return a number in [0, 2^64) that only `text` decides."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8, person=b"held-out split").digest(), "little")


def threshold(share: Fraction) -> int:
    """Return the bound below which a draw is held out, at most 2^64 - 1 so that it fits 64 bits."""
    return min(2**64 * share.numerator // share.denominator, 2**64 - 1)
