"""Replace personal data in text: e-mail addresses and public IPv4 and IPv6 addresses.

Replacements come from the ranges reserved for documentation (RFC 2606, RFC 5737, RFC 3849), so text stays well formed
for a model of code and logs. Versions, sections and expressions stay (v2.0.0.1, see 12.4.2.1, W@x.to(device)), and so
do user:password@host in a URL, special-purpose addresses (RFC 6890) and the service git@. Names, telephone numbers and
postal addresses stay, because no pattern finds them reliably.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from herd.llama3.data.text.words import ALONE

Span = tuple[int, int, str]
"""Start and stop of a piece of personal data, and its replacement."""
EMAIL = "email@example.com"
ADDRESS = "192.0.2.1"
ADDRESS_6 = "2001:db8::1"
_GENERIC = (
    "com|org|net|edu|gov|mil|int|info|biz|name|pro|mobi|asia|cat|coop|jobs|travel|museum|aero|tel|dev|app|xyz|online"
    "|site|shop|store|tech|cloud|blog|email|news|live|space|world|club|academy|systems|solutions|digital|agency|studio"
)
"""Top-level domains with more than two letters. With any word allowed, x@self.weight would be an address."""
_IDN = "рф|укр|бел|срб|мкд|қаз|ελ|ευ|中国|中國|公司|网络|香港|台灣|台湾|한국|भारत|ไทย|ایران|مصر|السعودية|امارات"
"""Non-ASCII top-level domains."""
_SOLID = "".join(f"{chr(low)}-{chr(high)}" for low, high in (*ALONE, (0xAC00, 0xD7A3)))
"""Scripts without spaces between words: at most four characters before the @ are part of an address."""
_LETTER = rf"(?:(?![_{_SOLID}])\w)"
_LABEL = rf"(?:{_LETTER}(?:(?:{_LETTER}|-){{0,61}}{_LETTER})?|[{_SOLID}]{{1,20}})"
_LOCAL = re.compile(
    rf"(?<![.%+'@_-])(?<!{_LETTER}){_LETTER}(?:(?:{_LETTER}|[._%+'-]){{0,62}}(?:{_LETTER}|[_+-]))?$|[{_SOLID}]{{1,4}}$"
)
_LONGEST_LOCAL = 64
_DOMAIN = re.compile(
    rf"(?:{_LABEL}\.){{1,8}}(?:[a-z]{{2}}|[A-Z]{{2}}|{_GENERIC}|{_GENERIC.upper()}|{_IDN})(?![a-zA-Z0-9_@(\[-]|\.\w)"
)
_USER = re.compile(r"(?<![A-Za-z0-9+.-])(?!mailto:)[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@<>\"']*$")
"""The part of a URL with a user before the @."""
_LONGEST_USER = 256
_FILE = re.compile(r"[^.]+\.py")
"""A name that ends in .py is more often a file than a host."""
_OWN_DOMAINS = re.compile(r"(?:^|\.)example\.(?:com|net|org)$", re.IGNORECASE)
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_ADDRESS = re.compile(rf"(?<![\w.+-])(?:{_OCTET}\.){{3}}{_OCTET}(?![\w+-]|\.\w)", re.ASCII)
_ADDRESS_6 = re.compile(r"(?<![\w:.])[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:){1,6}[0-9A-Fa-f]{0,4}(?![\w:]|\.\w)")
"""All public addresses begin with 2 or 3 and write all four digits of their first group."""
_GROUPS = 3
"""Minimum written groups of an address; `2006::` may end a line of reStructuredText."""
_VERSION = re.compile(
    r"(?:\b(?:v|ver|version|release|rev|revision|build|firmware|kernel|driver|linux|windows|android|chrome|firefox|java"
    r"|python|openssl|package|library|plugin|api|sdk|jdk|jre"
    r"|see|cf|section|sect|sec|chapter|clause|rule|figure|fig|table|paragraph|para|article|appendix|annex|item)s?\.?:?"
    r"|\b(?:upgrad|updat|bump|migrat)\w*\s(?:to|from)"
    r"|(?<![\w.])[0-9]+\.(?:[0-9]+|x)(?:\.(?:[0-9]+|x))?\s(?:to|and|or|through|until|-|–|->|→)"
    r"|==|>=|<=|~=|§)\s?$",
    re.IGNORECASE,
)
_BEFORE = 40
"""Characters before a number in which _VERSION is searched."""
_SPECIAL = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4",
    )
)  # fmt: skip
_SPECIAL_6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))
"""RFC 6890, written out because the result of Python's `is_global` differs between versions."""
_SIGNS = {"email": "@", "ip": r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]|[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]"}
"""Cheap test by kind: texts without a match are skipped."""


def redact(texts: Any, kinds: Sequence[str]) -> tuple[Any, NDArray[np.int64]]:
    """Return a string column without the personal data of `kinds` (email, ip), and the replacements per text, int64[n].

    `texts` is an array or chunked array of strings, nulls allowed; the column has its type.
    """
    counts = np.zeros(len(texts), np.int64)
    changed: dict[int, str] = {}
    for kind in kinds:
        suspects = pc.fill_null(pc.match_substring_regex(texts, _SIGNS[kind]), False)
        for index in np.flatnonzero(np.asarray(suspects)).tolist():
            text, count = redact_text(changed[index] if index in changed else texts[index].as_py(), kind)
            if count:
                changed[index] = text
                counts[index] += count
    if not changed:
        return texts, counts
    mask = np.zeros(len(texts), np.bool_)
    mask[list(changed)] = True
    values = pa.array([changed[index] for index in sorted(changed)], texts.type)
    return pc.replace_with_mask(texts, pa.array(mask), values), counts


def redact_text(text: str, kind: str) -> tuple[str, int]:
    """Return `text` without the personal data of `kind`, and the number of replacements."""
    pieces, at, count = [], 0, 0
    for start, stop, replacement in (_emails if kind == "email" else _addresses)(text):
        pieces += [text[at:start], replacement]
        at, count = stop, count + 1
    return ("".join([*pieces, text[at:]]) if count else text), count


def _emails(text: str) -> Iterator[Span]:
    """Yield the e-mail addresses, searched from each @ to both sides, because most text is not near one."""
    at = text.find("@")
    while at >= 0:
        domain = _DOMAIN.match(text, at + 1)
        if domain and not _OWN_DOMAINS.search(domain[0]) and not _FILE.fullmatch(domain[0]):
            local = _LOCAL.search(text[max(0, at - _LONGEST_LOCAL - 1) : at])
            if local and local[0] != "git" and not _USER.search(text[max(0, at - _LONGEST_USER) : at]):
                yield at - len(local[0]), domain.end(), EMAIL
        at = text.find("@", at + 1)


def _addresses(text: str) -> Iterator[Span]:
    """Yield the public IP addresses."""
    spans: list[Span] = []
    for match in _ADDRESS.finditer(text):
        address = IPv4Address(match[0])
        if all(byte < 10 for byte in address.packed) or any(address in network for network in _SPECIAL):
            continue
        if not _VERSION.search(text[max(0, match.start() - _BEFORE) : match.start()]):
            spans.append((*match.span(), ADDRESS))
    for match in _ADDRESS_6.finditer(text):
        if len(match[0].replace("::", ":").strip(":").split(":")) >= _GROUPS:
            with suppress(ValueError):  # a time, groups of hexadecimal digits
                address_6 = IPv6Address(match[0])
                if not any(address_6 in network for network in _SPECIAL_6):
                    spans.append((*match.span(), ADDRESS_6))
    yield from sorted(spans)
