"""Personal data in text, replaced by what nobody owns: e-mail addresses and public IPv4 and IPv6 addresses.

The replacements come from the ranges reserved for documentation (RFC 2606, RFC 5737, RFC 3849), so text stays well
formed for a model of code and logs. What reads as a version, a section or an expression stays: v2.0.0.1, see 12.4.2.1,
W@x.to(device); so do user:password@host in a URL, which tests are full of, addresses that name nobody (RFC 6890), and
git@, a service. Letters of all scripts count (RFC 6531); where words have no spaces between them, at most four
characters before the @ are taken. Names, telephone numbers and postal addresses stay, which no pattern finds surely.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from llama3.data.text.words import ALONE

Span = tuple[int, int, str]
"""Where a piece begins and ends, and what stands there instead."""
EMAIL = "email@example.com"
ADDRESS = "192.0.2.1"
ADDRESS_6 = "2001:db8::1"
_GENERIC = (
    "com|org|net|edu|gov|mil|int|info|biz|name|pro|mobi|asia|cat|coop|jobs|travel|museum|aero|tel|dev|app|xyz|online"
    "|site|shop|store|tech|cloud|blog|email|news|live|space|world|club|academy|systems|solutions|digital|agency|studio"
)
"""Top-level domains beside those of countries, which have two letters: any word would take x@self.weight for mail."""
_IDN = "рф|укр|бел|срб|мкд|қаз|ελ|ευ|中国|中國|公司|网络|香港|台灣|台湾|한국|भारत|ไทย|ایران|مصر|السعودية|امارات"
"""Top-level domains beyond ASCII."""
_SOLID = "".join(f"{chr(low)}-{chr(high)}" for low, high in (*ALONE, (0xAC00, 0xD7A3)))
"""Scripts that put an address behind a word, or a word behind an address, without a space."""
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
"""What stands before the @ of a URL that names its user."""
_LONGEST_USER = 256
_FILE = re.compile(r"[^.]+\.py")
"""What .py ends is a file more often than a host."""
_OWN_DOMAINS = re.compile(r"(?:^|\.)example\.(?:com|net|org)$", re.IGNORECASE)
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_ADDRESS = re.compile(rf"(?<![\w.+-])(?:{_OCTET}\.){{3}}{_OCTET}(?![\w+-]|\.\w)", re.ASCII)
_ADDRESS_6 = re.compile(r"(?<![\w:.])[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:){1,6}[0-9A-Fa-f]{0,4}(?![\w:]|\.\w)")
"""All public addresses begin with 2 or 3, and with all four digits of their first group."""
_GROUPS = 3
"""Fewest written groups of an address; `2006::` ends a line of reStructuredText."""
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
"""Characters in front of a number that are searched for a sign of a version."""
_NOBODYS = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4",
    )
)  # fmt: skip
_NOBODYS_6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))
"""Written out (RFC 6890): what Python's `is_global` says has changed between its versions."""
_SIGNS = {"email": "@", "ip": r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]|[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]"}
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
    parts, at, count = [], 0, 0
    for start, stop, instead in _KINDS[kind](text):
        parts += [text[at:start], instead]
        at, count = stop, count + 1
    return ("".join([*parts, text[at:]]) if count else text), count


def _emails(text: str) -> Iterator[Span]:
    """Yield the addresses: from each @ to both sides, since most characters are nowhere near one."""
    at = text.find("@")
    while at >= 0:
        domain = _DOMAIN.match(text, at + 1)
        if domain and not _OWN_DOMAINS.search(domain[0]) and not _FILE.fullmatch(domain[0]):
            local = _LOCAL.search(text[max(0, at - _LONGEST_LOCAL - 1) : at])
            if local and local[0] != "git" and not _USER.search(text[max(0, at - _LONGEST_USER) : at]):
                yield at - len(local[0]), domain.end(), EMAIL
        at = text.find("@", at + 1)


def _addresses(text: str) -> Iterator[Span]:
    """Yield the public addresses."""
    spans = [(*found.span(), ADDRESS) for found in _ADDRESS.finditer(text) if _is_public(text, found)]
    spans += [(*found.span(), ADDRESS_6) for found in _ADDRESS_6.finditer(text) if _is_public_6(found[0])]
    yield from sorted(spans)


def _is_public(text: str, found: re.Match[str]) -> bool:
    address = IPv4Address(found[0])
    if all(part < 10 for part in address.packed) or any(address in network for network in _NOBODYS):
        return False
    return not _VERSION.search(text[max(0, found.start() - _BEFORE) : found.start()])


def _is_public_6(found: str) -> bool:
    if len(found.replace("::", ":").strip(":").split(":")) < _GROUPS:
        return False
    try:
        address = IPv6Address(found)
    except ValueError:  # a time, groups of hexadecimal digits
        return False
    return not any(address in network for network in _NOBODYS_6)


_KINDS: dict[str, Callable[[str], Iterator[Span]]] = {"email": _emails, "ip": _addresses}
