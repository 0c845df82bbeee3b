"""Lines that belong together, told from the bytes of a text, so that rules on lines judge and remove whole paragraphs.

Text that an editor has wrapped (laws, RFCs, mail, manuals) breaks a line where the next word does not fit. Lists,
verse, code and tables break earlier, and text from web pages has a paragraph on a line. A line continues the one before
if that one had no room for its first word, in a text or a run of lines where most lines are so.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from herd.llama3.data.kernels.arrow import Bytes, Offsets
from herd.llama3.data.kernels.lines import BOUND, CONTINUES, line_end, strip_blanks

NARROWEST, WIDEST = 40, 120
"""Characters of the lines of wrapped text."""
_WITHIN = 0.97
"""Share of the lines that are at most as long as the width of a text; some tables and addresses are longer."""
_RAGGED = 4
"""Characters that a line may be shorter than it could be."""
_LEAST = 3
"""Breaks between words in a wrapped text or run of lines."""
_LOWER = 0.3
"""Share of continued lines that begin with a letter that is not an ASCII capital; verse begins with capitals."""
_NEWLINE, _SPACE, _TAB, _BAR = np.uint8(10), np.uint8(32), np.uint8(9), np.uint8(0x7C)
_START, _STOP, _LENGTH, _INDENT, _WORD, _KIND, _LOWERCASE, _FINAL, _WORDS_SEEN, _COLUMNS = range(10)
_FIELDS = 10
"""What is known of a line: the bytes of its visible characters, characters without the indentation, indentation,
characters of its first word, its kind, whether it begins in lower case, whether a statement ends with it, words, gaps
of three blanks and twice the tabs."""
_BLANK, _PROSE, _ITEM, _COMMENT, _ROW = range(5)
"""Kinds of lines; _ROW: of a table, or with gaps for columns."""
_WORDS = 4
"""Words of a line that another continues; rows of numbers and addresses have fewer."""


@njit(cache=True, nogil=True)
def line_flags(data: Bytes, offsets: Offsets, flags: Bytes) -> None:
    """Write the flags of every line of the texts; `flags` is zeroed and has room for all lines."""
    lines = np.empty((64, _FIELDS), np.int64)
    line = 0
    for text in range(len(offsets) - 1):
        at, stop, count = offsets[text], offsets[text + 1], 0
        while at <= stop:
            if count == len(lines):
                grown = np.empty((2 * count, _FIELDS), np.int64)
                grown[:count] = lines
                lines = grown
            at = _measure_line(data, at, stop, lines, count) + 1
            count += 1
        found, flagged = lines[:count], flags[line : line + count]
        width = _width(found)
        wrapped = NARROWEST <= width <= WIDEST
        for number in range(count):
            _tell_kind(data, found, number, wrapped)
        _bind(data, found, flagged)
        if wrapped:
            _continue(found, width, flagged)
        line += count


@njit(cache=True, nogil=True)
def join_paragraphs(data: Bytes, offsets: Offsets, flags: Bytes) -> None:
    """Write a blank in place of the line end before each line that continues another; no byte moves."""
    line = 0
    for text in range(len(offsets) - 1):
        at, stop = offsets[text], offsets[text + 1]
        while at <= stop:
            if flags[line] & CONTINUES:
                data[at - 1] = _SPACE
            line, at = line + 1, line_end(data, at, stop) + 1


@njit(cache=True, nogil=True)
def _measure_line(data: Bytes, start: int, stop: int, lines: Offsets, number: int) -> int:
    """Write where a line is, its indentation and its characters; return where it ends."""
    at = line_end(data, start, stop)
    first, last = strip_blanks(data, start, at)
    # Sums without branches, which would be predicted wrongly at each word.
    wide, words, columns = 0, int(first < last), 0
    before, twice, thrice = 0, 0, 0  # whether the last byte, the last two, the last three are blank
    for position in range(first, last):
        byte = data[position]
        wide += int(byte & np.uint8(0xC0) == np.uint8(0x80))
        tab = int(byte == _TAB)
        blank = int(byte == _SPACE) | tab
        words += before & (1 - blank)
        columns += (twice & blank & (1 - thrice)) + 2 * tab
        before, twice, thrice = blank, blank & before, blank & twice
    lines[number, :] = 0
    lines[number, _START], lines[number, _STOP], lines[number, _LENGTH] = first, last, last - first - wide
    lines[number, _WORDS_SEEN], lines[number, _COLUMNS] = words, columns
    indent = 0
    for position in range(start, first):
        indent += 8 if data[position] == _TAB else 1
    lines[number, _INDENT] = indent
    return at


@njit(cache=True, nogil=True)
def _tell_kind(data: Bytes, lines: Offsets, number: int, wrapped: bool) -> None:
    """Write the kind of a line, and of one in a text that may be `wrapped` what tells where a break is."""
    first, last = lines[number, _START], lines[number, _STOP]
    if first == last:
        return
    head, tail = data[first], data[last - 1]
    lines[number, _KIND] = _ROW if head == _BAR or tail == _BAR else _PROSE
    if not wrapped:
        return
    at, word = first, 0
    while at < last and data[at] != _SPACE and data[at] != _TAB:
        word += data[at] & np.uint8(0xC0) != np.uint8(0x80)
        at += 1
    lines[number, _WORD] = word
    lines[number, _LOWERCASE] = not (np.uint8(0x41) <= head <= np.uint8(0x5A))
    lines[number, _FINAL] = tail in (0x3B, 0x7B, 0x7D, 0x5C)  # ; { } \
    if lines[number, _COLUMNS] > 1:
        lines[number, _KIND] = _ROW
    elif head == 0x23:  # number sign
        lines[number, _KIND] = _COMMENT
    elif lines[number, _KIND] != _ROW and _is_item(data, first, last):
        lines[number, _KIND] = _ITEM


@njit(cache=True, nogil=True)
def _is_item(data: Bytes, first: int, last: int) -> bool:
    """Return whether a line begins with a mark or number of a list, or a quote: `- `, `3. `, `(a) `, `> `."""
    head, at = data[first], first
    if head in (0x2D, 0x2A, 0x2B, 0x3E, 0x3A):  # - * + > :
        return first + 1 >= last or data[first + 1] in (_SPACE, _TAB, head)
    if head == 0xE2 and first + 3 < last and data[first + 1] == 0x80 and data[first + 3] == _SPACE:  # bullets, dashes
        return True
    at += head == 0x28  # (
    while (
        at < last
        and at - first < 6
        and (0x30 <= data[at] <= 0x39 or (at == first + (head == 0x28) and data[at] >= 0x61))
    ):
        at += 1
    marked = at < last and at > first + (head == 0x28) and data[at] in (0x2E, 0x29)  # . )
    return bool(marked and at + 1 < last and data[at + 1] == _SPACE)


@njit(cache=True, nogil=True)
def _bind(data: Bytes, lines: Offsets, flags: Bytes) -> None:
    """Flag fenced blocks, rows of tables, and lines that open or close something: one half alone breaks the text."""
    fence, fence_line = np.uint8(0), 0
    for number in range(len(lines)):
        if lines[number, _KIND] == _BLANK:
            continue
        at = lines[number, _START]
        head = data[at]
        thrice = lines[number, _LENGTH] >= 3 and data[at + 1] == head and data[at + 2] == head
        if thrice and (head == 0x60 or head == 0x7E) and (fence == 0 or fence == head):  # ``` ~~~
            if fence == 0:
                fence, fence_line = head, number
            else:
                flags[fence_line : number + 1] |= BOUND
                fence = np.uint8(0)
        if _opens_or_closes(head, data[lines[number, _STOP] - 1]) or (thrice and head in (0x60, 0x7E, 0x2F, 0x3A)):
            flags[number] |= BOUND
        if head == 0x3A and lines[number, _LENGTH] > 1 and data[at + 1] == _SPACE and number > 0:  # `: ` defines a term
            flags[number] |= BOUND
            flags[number - 1] |= BOUND
        if lines[number, _KIND] == _ROW:
            flags[number] |= BOUND


@njit(cache=True, nogil=True)
def _opens_or_closes(head: int, tail: int) -> bool:
    """Return whether a line ends with an opening bracket, begins with a closing one, or is a tag."""
    opens = tail in (0x28, 0x5B, 0x7B)
    closes = head in (0x29, 0x5D, 0x7D)
    return bool(opens or closes or (head == 0x3C and tail == 0x3E))


@njit(cache=True, nogil=True)
def _width(lines: Offsets) -> int:
    """Return the characters that nearly all lines of a text have at most, up to one above WIDEST."""
    lengths, total = np.zeros(WIDEST + 2, np.int64), 0
    for number in range(len(lines)):
        if lines[number, _START] < lines[number, _STOP]:
            lengths[min(lines[number, _INDENT] + lines[number, _LENGTH], WIDEST + 1)] += 1
            total += 1
    seen, width = 0, 0
    while width <= WIDEST:
        seen += lengths[width]
        if seen >= _WITHIN * total:
            return width
        width += 1
    return width


@njit(cache=True, nogil=True)
def _breaks(lines: Offsets, number: int, width: int) -> int:
    """Return 1 if line `number` continues the one before by its width, 0 if it does not, -1 if nothing follows."""
    kind, before = lines[number, _KIND], lines[number - 1, _KIND]
    if kind in (_BLANK, _ITEM, _COMMENT) or before == _BLANK:
        return -1
    indent, indent_before = lines[number, _INDENT], lines[number - 1, _INDENT]
    begins = number < 2 or lines[number - 2, _KIND] == _BLANK or before == _ITEM  # the first line of a paragraph
    aligned = indent == indent_before or (begins and abs(indent - indent_before) <= 10)
    if kind == _ROW or before in (_ROW, _COMMENT) or not aligned or lines[number - 1, _FINAL]:
        return 0
    if lines[number - 1, _WORDS_SEEN] < _WORDS:
        return 0
    filled = indent_before + lines[number - 1, _LENGTH] + 1 + lines[number, _WORD]
    return int(filled > width - _RAGGED)


@njit(cache=True, nogil=True)
def _continue(lines: Offsets, width: int, flags: Bytes) -> None:
    """Flag the lines that continue others, if the text is wrapped as a whole, or a run of lines is."""
    total = np.zeros(3, np.int64)
    begin = 0
    while begin < len(lines):
        end, room = _run(lines, begin, width)
        total += _count(lines, begin, end, room)
        begin = end
    whole = total[0] >= _LEAST and total[0] >= total[2] and total[1] >= _LOWER * total[0]
    begin = 0
    while begin < len(lines):
        end, room = _run(lines, begin, width)
        found = _count(lines, begin, end, room)
        if whole or (found[0] >= _LEAST and found[2] == 0 and found[1] >= _LOWER * found[0]):
            for number in range(begin + 1, end):
                bound = (flags[number] | flags[number - 1]) & BOUND != 0
                if not bound and _breaks(lines, number, room) == 1:
                    flags[number] |= CONTINUES
        begin = end


@njit(cache=True, nogil=True)
def _run(lines: Offsets, begin: int, width: int) -> tuple[int, int]:
    """Return where the run of non-blank lines from `begin` ends, and its width: some paragraphs are narrower."""
    end, longest = begin, 0
    while end < len(lines) and (end == begin or lines[end, _KIND] != _BLANK):
        longest = max(longest, lines[end, _INDENT] + lines[end, _LENGTH])
        end += 1
    return end, min(width, max(longest, NARROWEST)) if end - begin > _LEAST else width


@njit(cache=True, nogil=True)
def _count(lines: Offsets, begin: int, end: int, width: int) -> Offsets:
    """Return how many lines of a run continue others, how many of them begin in lower case, how many do not."""
    counts = np.zeros(3, np.int64)
    for number in range(begin + 1, end):
        breaks = _breaks(lines, number, width)
        counts[0] += breaks == 1
        counts[1] += breaks == 1 and lines[number, _LOWERCASE] != 0
        counts[2] += breaks == 0
    return counts
