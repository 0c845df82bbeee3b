"""Replace personal data in text: e-mail addresses and public IPv4 and IPv6 addresses.

Replacements come from the ranges reserved for documentation (RFC 2606, RFC 5737, RFC 3849), so text stays well formed
for a model of code and logs. Any marks, blanks or quotes may enclose an address. Code, users in URLs and versions stay
(`_is_code`, `_in_url`, `_is_version`), unless the text has the same address elsewhere. Special-purpose addresses
(RFC 6890) stay. Names, telephone numbers and postal addresses stay, because no pattern finds them reliably.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import regex
from numpy.typing import NDArray
from publicsuffixlist import PSLFILE

from herd.llama3.data.text.words import ALONE

EMAIL = "email@example.com"
ADDRESS = "192.0.2.1"
ADDRESS_6 = "2001:db8::1"
_SIGNS = {"email": "@", "ip": r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]|[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]"}
"""Cheap test by kind: texts without a match are skipped."""


class Address(NamedTuple):
    """An address in a text."""

    start: int
    stop: int
    replacement: str
    sure: bool
    """False if it may be code, the user of a URL or a version."""


Place = tuple[int, int, str]
"""First character of an address, the one after its last, and its kind."""


class Redacted(NamedTuple):
    """A string column without personal data."""

    texts: Any
    counts: NDArray[np.int64]
    """Replacements per text."""
    places: dict[int, list[Place]]
    """Index of a text -> what was replaced, in characters of the text before."""


def redact(texts: Any, kinds: Sequence[str]) -> Redacted:
    """Replace the personal data of `kinds` (email, ip).

    `texts` is an array or chunked array of strings, nulls allowed; the column of the result has its type.
    """
    counts = np.zeros(len(texts), np.int64)
    changed: dict[int, str] = {}
    places: dict[int, list[Place]] = {}
    edits: dict[int, list[Address]] = {}
    for kind in kinds:
        suspects = pc.fill_null(pc.match_substring_regex(texts, _SIGNS[kind]), False)
        for index in np.flatnonzero(np.asarray(suspects)).tolist():
            text = changed[index] if index in changed else texts[index].as_py()
            if found := addresses(text, kind):
                changed[index] = _replaced(text, found)
                counts[index] += len(found)
                spans = [(address.start, address.stop) for address in found]
                before = _before(spans, edits[index]) if index in edits else spans
                places.setdefault(index, []).extend((start, stop, kind) for start, stop in before)
                edits[index] = found
    if not changed:
        return Redacted(texts, counts, places)
    mask = np.zeros(len(texts), np.bool_)
    mask[list(changed)] = True
    values = pa.array([changed[index] for index in sorted(changed)], texts.type)
    return Redacted(pc.replace_with_mask(texts, pa.array(mask), values), counts, places)


def redact_text(text: str, kind: str) -> tuple[str, int]:
    """Return `text` without the personal data of `kind`, and the number of replacements."""
    found = addresses(text, kind)
    return _replaced(text, found), len(found)


def addresses(text: str, kind: str) -> list[Address]:
    """Return the addresses of `kind` to replace, in order: one that is sure at one place is replaced at every place."""
    found = list((_emails if kind == "email" else _ip_addresses)(text))
    known = {text[address.start : address.stop].lower() for address in found if address.sure}
    chosen, at = [], 0
    for address in sorted(found) if known else ():
        if address.start >= at and (address.sure or text[address.start : address.stop].lower() in known):
            chosen.append(address)
            at = address.stop
    return chosen


def _replaced(text: str, found: Sequence[Address]) -> str:
    pieces, at = [], 0
    for start, stop, replacement, _ in found:
        pieces += [text[at:start], replacement]
        at = stop
    return "".join([*pieces, text[at:]])


def _before(spans: Sequence[tuple[int, int]], edits: Sequence[Address]) -> Any:
    """Return where the `spans` of a text were before `edits` replaced others."""
    longer = np.cumsum([0, *(edit.stop - edit.start - len(edit.replacement) for edit in edits)])
    ends = np.array([edit.stop for edit in edits]) - longer[1:]
    now = np.array(spans)
    return (now + longer[np.searchsorted(ends, now[:, :1], "right")]).tolist()


# E-mail addresses

_SOLID = "".join(f"{chr(low)}-{chr(high)}" for low, high in (*ALONE, (0xAC00, 0xD7A3)))
"""Scripts without spaces between words: at most four characters before the @ are part of an address."""
_LETTER = rf"[\w--[_{_SOLID}]]"
_LOCAL = regex.compile(
    rf"(?V1)(?=[\w+-])(?:{_LETTER}|[_%+-]|\.(?!\.)|(?<={_LETTER})'(?={_LETTER})){{1,64}}(?<={_LETTER})(?!{_LETTER})"
    rf"|[{_SOLID}]{{1,4}}"
)
"""The part before the @, backwards. Marks belong to it after a letter or digit, an apostrophe between two of them."""
_LONGEST_LOCAL = 64
_NO_NAMES = "com|org|net|edu|gov"
"""Top-level domains that are not also names in code."""
_LABELS = rf"(?:(?>{_LETTER}(?:(?:{_LETTER}|-){{0,61}}{_LETTER})?|[{_SOLID}]{{1,20}})\.){{1,8}}"
_NO_NAMES_DOMAIN = regex.compile(rf"(?V1){_LABELS}(?i:{_NO_NAMES})(?![A-Za-z0-9])")
_ENDS_IN_NO_NAME = re.compile(rf"\.(?:{_NO_NAMES})$", re.IGNORECASE)
_ESCAPES = {"\\": re.compile(r"u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|[nrtfv]"), "%": re.compile(r"[2-7][0-9A-Fa-f]")}
"""What belongs to the mark before a local part: `\\njane@`, `%3Cjane@`."""
_STRING = re.compile(r"(?i:[bfru]|[bf]r|r[bf])|[NE]")
"""Prefixes of strings in Python and SQL: `b'jane@acme.org'`."""
_DIRECTIVE = re.compile(r"[sdiu]@")
_CODE = re.compile(r"git@.*|.*@(?:(?:self|cls|this)\..*|[0-9]x\..*|[^.]+\.(?:py|zip|mov|data|dot|map|prod))")
_CODE_NAMES = re.compile(
    r"(?:this|super|return|break|continue)@.*|.*@[0-9]+\.[^.]*"
    r"|(?:.*\.)?[A-Za-z][0-9]?@[A-Za-z][0-9]?\.(?:\w+\.)*[a-z]{3,}|(?=[A-Z]|.*@[A-Z])[A-Za-z][0-9]?@[A-Za-z][0-9]?\.[a-z]+"
)
_OWN_DOMAINS = re.compile(r"(?:^|\.)example\.(?:com|net|org)$", re.IGNORECASE)
_USER = re.compile(r"(?<![A-Za-z0-9+.-])(?!mailto:)[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@<>\"']*\Z")
"""The part of a URL with a user before the @."""
_LONGEST_USER = 256


@cache
def top_level_domains() -> frozenset[str]:
    """Return the top-level domains of the Public Suffix List, in lower case, those in other scripts also as `xn--`."""
    icann, _, _ = Path(PSLFILE).read_text("utf-8").partition("// ===END ICANN DOMAINS===")
    rules = (line.split()[0] for line in icann.splitlines() if line.strip() and not line.startswith("//"))
    tlds = {rule.rpartition(".")[2] for rule in rules}
    return frozenset(tlds | {tld.encode("idna").decode("ascii") for tld in tlds})


@cache
def _domain() -> Any:
    """Return the pattern of a domain; its group `ascii` may be a top-level domain.

    That label is in lower or upper case, so that `this@Main.Name` is not an address. After it, only a sentence may
    begin without a blank: `jane@web.de.Please`.
    """
    idn = "|".join(sorted((tld for tld in top_level_domains() if not tld.isascii()), key=len, reverse=True))
    tld = rf"(?=[a-z]*[^ -~])(?:{idn})(?!{_LETTER})|(?P<ascii>(?i:xn--[a-z0-9-]+)|[a-z]{{2,}}|[A-Z]{{2,}})"
    return regex.compile(rf"(?V1){_LABELS}(?:{tld})(?![A-Za-z0-9]|\.(?![A-Z][a-z]){_LETTER})")


def _match_domain(text: str, at: int) -> Any:
    """Return the match of the domain that begins at `at`, or None."""
    match = _domain().match(text, at)
    if match and (not match["ascii"] or match["ascii"].lower() in top_level_domains()):
        return match
    return _NO_NAMES_DOMAIN.match(text, at)


def _emails(text: str) -> Iterator[Address]:
    """Yield the e-mail addresses, searched from each @ to both sides, because most text is not near one."""
    at, least = text.find("@"), 0
    while at >= 0:
        domain = _match_domain(text, at + 1) if at and (text[at - 1].isalnum() or text[at - 1] in "_+-\\") else None
        if domain and not _OWN_DOMAINS.search(domain[0]):
            end = at - 1 if text[at - 1] == "\\" else at  # Perl: "jane\@acme.org"
            start = _local_start(text, max(least, end - _LONGEST_LOCAL - 1), end, domain.end())
            if start < end:
                sure = not _is_code(text, start, end, domain[0], domain.end()) and not _in_url(text, at)
                yield Address(start, domain.end(), EMAIL.replace("@", text[end : at + 1]), sure)
                least = domain.end() if sure else least
        at = text.find("@", at + 1)


def _local_start(text: str, least: int, end: int, stop: int) -> int:
    """Return where the local part that ends at `end` begins, `least` or later, or `end` if there is none."""
    match = _LOCAL.match(text[least:end][::-1])
    if not match:
        return end
    start = end - len(match[0])
    head, quote, _ = text[start:end].rpartition("'")
    if quote and (_STRING.fullmatch(head) or text[stop : stop + 1] == "'" != text[start - 1 : start]):
        start += len(head) + 1
    escape = _ESCAPES.get(text[start - 1 : start]) if start else None
    if escape and (escaped := escape.match(text, start, end)):
        start = escaped.end()
        start += len(text[start:end]) - len(text[start:end].lstrip("._%+'-"))
    return start


def _is_code(text: str, start: int, end: int, host: str, stop: int) -> bool:
    """Return whether the address text[start:stop] is more often code.

    Code is: the service `git@`, a file (`run@main.py`, `icon@2x.md`), a format (`%s@acme.org`), a product of three
    matrices (`a@b.T@c.T`), a host that begins with `self.`, and an attribute whose top-level domain sells no names
    (`hidden@proj.data`, `.dot`, `.map`, `.prod`). If the host ends in none of _NO_NAMES, code is also: a
    call, an index or a longer name (`W@x.to(device)`, `W@x.is_cuda`), names of one letter (`x@w.data`, `A@b.to`), a
    version (`foo@1.bar`) and a label (`this@Main.name`).
    """
    name, before, after = f"{text[start:end]}@{host}", text[max(0, start - 2) : start], text[stop : stop + 2]
    if _CODE.fullmatch(name) or (before[-1:] == "%" and _DIRECTIVE.match(name)):
        return True
    if (before[-1:] == "@" and before[0].isalnum()) or (after[:1] == "@" and after[1:].isalnum()):
        return True
    if _ENDS_IN_NO_NAME.search(host):
        return False
    longer = after[:1] in ("_", "-") and after[1:].isalnum()
    return longer or after[:1] in ("(", "[") or _CODE_NAMES.fullmatch(name) is not None


def _in_url(text: str, at: int) -> bool:
    """Return whether the @ follows the user of a URL: `ftp://jane@ftp.uni.de`, `http://user:password@host.org`."""
    before = text[max(0, at - _LONGEST_USER) : at]
    return "://" in before and _USER.search(before) is not None


# IP addresses

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DOTS = re.compile(r"\.(?<=[0-9]\.)[0-9]{1,3}\.[0-9]{1,3}\.[0-9]")
_ADDRESS = re.compile(rf"(?:{_OCTET}\.){{3}}{_OCTET}(?![0-9A-Za-z]|\.[0-9])")
_ONE_DIGIT_EACH = len("1.2.3.4")
"""Such an address is a version or a section."""
_LONGER = re.compile(r"[0-9A-Za-z]\.?\Z")
"""Before a number: it is a part of something longer."""
_ADDRESS_6 = re.compile(r"[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:){1,6}[0-9A-Fa-f]{0,4}")
"""All public addresses begin with 2 or 3 and write all four digits of their first group."""
_AFTER_6 = re.compile(r"[0-9A-Za-z]|::|:(?![0-9]{1,5}(?![0-9A-Fa-f:]))[0-9A-Fa-f]|\.(?![A-Z][a-z])[0-9A-Za-z]")
"""What shows that an address of IPv6 is a part of something longer; a port may follow."""
_BEFORE_6 = re.compile(r"(?:[0-9A-Za-z]\.?|(?:^|[^0-9A-Za-z])[0-9A-Fa-f]{1,4}:|::)\Z")
_GROUPS = 3
"""Minimum written groups of an address; `2006::` may end a line of reStructuredText."""
_VERSION = re.compile(
    r"(?:(?:(?<![\w-])(?:v|ver|release|rev|revision|build|firmware)|version)s?(?:\W|_){0,4}"
    r"|(?:\b(?:kernel|driver|linux|windows|android|chrome|firefox|java"
    r"|python|openssl|package|library|plugin|api|sdk|jdk|jre"
    r"|see|cf|section|sect|sec|chapter|clause|rule|figure|fig|table|paragraph|para|article|appendix|annex|item)s?\.?:?"
    r"|\b(?:upgrad|updat|bump|migrat)\w*\s(?:to|from)"
    r"|(?<![\w.])[0-9]+\.(?:[0-9]+|x)(?:\.(?:[0-9]+|x))?\s(?:to|and|or|through|until|-|–|->|→)"
    r"|==|>=|<=|~=|§)\s?)\Z",
    re.IGNORECASE,
)
_BEFORE = 40
"""Characters before a number in which _VERSION is searched."""
_PREFIX = re.compile(r"[0-9A-Za-z][+-]\Z")
_RANGE = re.compile(rf"(?<![0-9A-Za-z.])(?:{_OCTET}\.){{3}}{_OCTET}-\Z")
_JOINED = re.compile(
    rf"-(?!(?:{_OCTET}\.){{3}}{_OCTET}(?![0-9A-Za-z]))[0-9A-Za-z]|\+[0-9A-Za-z]|\.(?![A-Z][a-z])[A-Za-z]"
    r"|_(?:all|amd64|arm|aarch64|i[3-6]86|x64|x86|linux|darwin|mac|win)"
)
"""What follows the version in the name of a package: 93.184.21.3-rc1, tool_93.184.21.3_amd64.deb."""
_SPECIAL = sorted(
    (int(network[0]), int(network[-1]))
    for network in map(IPv4Network, (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4",
    ))
)  # fmt: skip
"""First and last address of each network."""
_SPECIAL_6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))
"""RFC 6890, written out because the result of Python's `is_global` differs between versions."""


def _ip_addresses(text: str) -> Iterator[Address]:
    """Yield the public IP addresses."""
    for dots in _DOTS.finditer(text):
        stop = dots.start()
        start = stop - 1
        while start and stop - start < 3 and text[start - 1] in "0123456789":
            start -= 1
        match = _ADDRESS.match(text, start)
        if not match or match.end() - start == _ONE_DIGIT_EACH or _LONGER.search(text, max(0, start - 2), start):
            continue
        if _is_special(int.from_bytes(map(int, match[0].split(".")))):
            continue
        yield Address(start, match.end(), ADDRESS, not _is_version(text, start, match.end()))
    for match in _ADDRESS_6.finditer(text):
        written, start = match[0], match.start()
        if "::" not in written and written.count(":") < 7:  # a time, groups of hexadecimal digits
            continue
        if written[-1] == ":" != written[-2]:
            written = written[:-1]
        stop = start + len(written)
        if len(written.replace("::", ":").strip(":").split(":")) < _GROUPS:
            continue
        if _AFTER_6.match(text, stop) or _BEFORE_6.search(text[max(0, start - 6) : start]):
            continue
        with suppress(ValueError):
            address_6 = IPv6Address(written)
            if not any(address_6 in network for network in _SPECIAL_6):
                yield Address(start, stop, ADDRESS_6, True)


def _is_special(address: int) -> bool:
    place = bisect_right(_SPECIAL, (address, 1 << 32)) - 1
    return place >= 0 and address <= _SPECIAL[place][1]


def _is_version(text: str, start: int, stop: int) -> bool:
    """Return whether the number text[start:stop] is more often a version or a section.

    It is after a word such as `version` or `see`, and if `+` or `-` joins it with a word (libx-93.184.21.3-rc1) but not
    with another address (a range). It is also part of the name of a file or host: 93.184.21.3.tar.gz.
    """
    before = text[max(0, start - _BEFORE) : start]
    if _PREFIX.search(before) and not _RANGE.search(before):
        return True
    return bool(_JOINED.match(text, stop) or _VERSION.search(before))
