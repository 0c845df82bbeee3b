"""Personal data in text, replaced by what nobody owns: e-mail addresses and public IPv4 addresses.

The replacements come from the ranges reserved for documentation (RFC 2606, RFC 5737), so text stays well formed for a
model of code and logs. Four numbers are an address only if each is at most 255, no letter, sign of a version or fifth
part stands beside them and they are not all below ten: 1.2.3.4567, v2.0.0.1 and section 3.1.4.2 stay. Private and
reserved addresses name nobody and stay, and so does git@, a service. What this gives up: names, telephone numbers and
postal addresses, which no pattern finds surely; the paper drops whole sites instead (arXiv 2407.21783, section 3.1.1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

EMAIL = "email@example.com"
ADDRESS = "192.0.2.1"
_GENERIC = (
    "com|org|net|edu|gov|mil|int|info|biz|name|pro|mobi|asia|cat|coop|jobs|travel|museum|aero|tel|dev|app|xyz|online"
    "|site|shop|store|tech|cloud|blog|email|news|live|space|world|club|academy|systems|solutions|digital|agency|studio"
)
"""Top-level domains beside those of countries, which have two letters: any word would take x@self.weight for mail."""
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_LOCAL = re.compile(r"(?<![\w.%+'@-])[A-Za-z0-9](?:[A-Za-z0-9._%+'-]{0,62}[A-Za-z0-9_+-])?$", re.ASCII)
_LONGEST_LOCAL = 64
_DOMAIN = re.compile(
    rf"(?:{_LABEL}\.){{1,8}}(?:[a-z]{{2}}|[A-Z]{{2}}|{_GENERIC}|{_GENERIC.upper()})(?![\w@-]|\.\w)", re.ASCII
)
_OWN_DOMAINS = re.compile(r"(?:^|\.)example\.(?:com|net|org)$", re.IGNORECASE)
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_ADDRESS = re.compile(rf"(?<![\w.+-])(?:{_OCTET}\.){{3}}{_OCTET}(?![\w+-]|\.\w)", re.ASCII)
_VERSION = re.compile(
    r"(?:\b(?:v|ver|version|release|rev|revision|build|firmware|section|sect|chapter|clause|rule|figure|table)s?\.?:?"
    r"|==|>=|<=|~=|§)\s?$",
    re.IGNORECASE,
)
_BEFORE = 16
"""Characters in front of a number that are searched for a sign of a version."""
_NOBODYS = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4",
    )
)  # fmt: skip
"""Written out (RFC 6890): what Python's `is_global` says has changed between its versions."""
_SIGNS = {"email": "@", "ip": r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]"}
"""A cheap test, by kind: texts without it are not looked at."""


def redact(texts: Any, kinds: Sequence[str]) -> tuple[Any, NDArray[np.int64]]:
    """Return a string column without the personal data of `kinds` (email, ip), and how often each text was changed.

    `texts` is an array or chunked array of strings, nulls allowed; the column has its type. int64[n] counts.
    """
    counts = np.zeros(len(texts), np.int64)
    changed: dict[int, str] = {}
    for kind in kinds:
        found = pc.fill_null(pc.match_substring_regex(texts, _SIGNS[kind]), False)
        for place in np.flatnonzero(np.asarray(found)).tolist():
            text, count = redact_text(changed[place] if place in changed else texts[place].as_py(), kind)
            if count:
                changed[place] = text
                counts[place] += count
    if not changed:
        return texts, counts
    mask = np.zeros(len(texts), np.bool_)
    mask[list(changed)] = True
    values = pa.array([changed[place] for place in sorted(changed)], texts.type)
    return pc.replace_with_mask(texts, pa.array(mask), values), counts


def redact_text(text: str, kind: str) -> tuple[str, int]:
    """Return `text` without the personal data of `kind`, and how many pieces of it there were."""
    spans, instead = _KINDS[kind]
    parts, at, count = [], 0, 0
    for start, stop in spans(text):
        parts += [text[at:start], instead]
        at, count = stop, count + 1
    return ("".join([*parts, text[at:]]) if count else text), count


def _emails(text: str) -> Iterator[tuple[int, int]]:
    """Yield where addresses begin and end: from each @ to both sides, since most characters are nowhere near one."""
    at = text.find("@")
    while at >= 0:
        domain = _DOMAIN.match(text, at + 1)
        if domain and not _OWN_DOMAINS.search(domain[0]):
            before = text[max(0, at - _LONGEST_LOCAL - 1) : at]
            local = _LOCAL.search(before)
            if local and local[0] != "git":
                yield at - len(local[0]), domain.end()
        at = text.find("@", at + 1)


def _addresses(text: str) -> Iterator[tuple[int, int]]:
    """Yield where public addresses begin and end."""
    for found in _ADDRESS.finditer(text):
        address = IPv4Address(found[0])
        if all(part < 10 for part in address.packed) or any(address in network for network in _NOBODYS):
            continue
        if not _VERSION.search(text[max(0, found.start() - _BEFORE) : found.start()]):
            yield found.span()


_KINDS: dict[str, tuple[Callable[[str], Iterator[tuple[int, int]]], str]] = {
    "email": (_emails, EMAIL),
    "ip": (_addresses, ADDRESS),
}
