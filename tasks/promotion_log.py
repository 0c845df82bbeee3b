"""The promotion log of a family: `promotions/<family>/<n>.json`, each record written once and never changed.

It is the only truth about who is the champion; MLflow shows it. A record takes its place by a conditional write
(`Root.create`), which is the compare-and-set: of many promoters that decided against the same head one gets the place,
and the others read what came in between and decide again. Each record holds the digest of the document before it, so
that one that was changed, or lost from the middle, is noticed by whoever reads. With a key (storage/signing.py) they
are signed, and the newest must be: it vouches for those before. What this gives up: the loss of the newest record is
not noticed, and a reader fetches every record of its family (a few kB each, sixteen at a time).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable

from pydantic import ValidationError

from storage.digests import digest_json
from storage.root import Root
from storage.signing import distrust, signed
from storage.threads import READERS, each
from tasks.promotions import Log, Promotion, holder, holders, judged

FOLDER, KIND = "promotions", "promotion"
_DOCUMENT = re.compile(r"(\d{8})\.json")
Write = Callable[[Log], Promotion]
"""Decides by the records so far. Asked again after each lost race, so what it takes long to find out it must keep."""


class PromotionLog:
    """The records of one family as they were read, to which one can be added."""

    def __init__(self, root: Root, family: str, trusted: bool = True) -> None:
        """Read every record. Raises ValueError if one is damaged or missing, or no trusted key signed the newest.

        Without `trusted` nobody need have signed it.
        """
        self.root, self.family, self.trusted = root, family, trusted
        self.records: list[Promotion] = []
        self._head, self._text = "", b""
        names = root.names(FOLDER, family)
        listed = max((int(found[1]) for name in names if (found := _DOCUMENT.fullmatch(name))), default=0)
        for number, text in enumerate(each(self._read, range(1, listed + 1), READERS), start=1):
            if text is None:
                raise ValueError(f"{self._place(number)}: is missing from the promotion log; {_REMEDY}")
            self._take(text)
        self.refresh()  # listings may lag

    def sign(self) -> None:
        """Sign the newest record, in a file beside it: records themselves are never changed."""
        self.root.write(signed(KIND, self._head), FOLDER, self.family, f"{len(self.records):08}.signature")

    def append(self, write: Write) -> Promotion:
        """Add the record that `write` decides on, by the records as they are when it takes its place; return it.

        What `write` raises passes through, with nothing added. Raises OSError if storage does not answer.
        """
        while True:
            self.refresh()
            number = len(self.records) + 1
            record = write(self.records).model_copy(update={"n": number, "previous": self._head})
            text = _signed(record).model_dump_json(indent=1).encode()
            if self.root.create(text, FOLDER, self.family, _name(number)):
                if self._read(number) != text:
                    raise OSError(f"{self._place(number)}: holds other bytes than were written; {_REMEDY}")
                self._take(text)
                return self.records[-1]

    def refresh(self) -> None:
        """Read the records that were added meanwhile. Raises ValueError as the beginning does."""
        while text := self._read(len(self.records) + 1):
            self._take(text)
        if self.trusted and self.records and (why := self.distrusted()):
            raise ValueError(f"{self._place(len(self.records))}: {why}")

    def _read(self, number: int) -> bytes | None:
        return self.root.read(FOLDER, self.family, _name(number))

    def _take(self, text: bytes) -> None:
        """Add a document that was read. Raises ValueError unless it follows the one before."""
        number = len(self.records) + 1
        try:
            record = Promotion.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(f"{self._place(number)}: is no record of a promotion; {_REMEDY}") from error
        if (record.n, record.previous) != (number, self._head):
            raise ValueError(f"{self._place(number)}: does not follow the record before it, one was changed; {_REMEDY}")
        if record.family != self.family:
            raise ValueError(f"{self._place(number)}: is a record of the family {record.family}; {_REMEDY}")
        self.records.append(record)
        self._text = text
        self._head = hashlib.sha256(text).hexdigest()

    def distrusted(self) -> str:
        """Return why the newest record is not to be believed, empty if it is."""
        data = json.loads(self._text)
        own, digest = data.pop("signature", ""), digest_json(data)
        if why := distrust(KIND, digest, own):
            beside = self.root.read(FOLDER, self.family, f"{len(self.records):08}.signature") or b""
            return why if distrust(KIND, self._head, beside.decode(errors="replace")) else ""
        return ""

    def _place(self, number: int) -> str:
        return f"{FOLDER}/{self.family}/{_name(number)}"


_REMEDY = "restore the folder of the log from a copy"


def families(root: Root) -> list[str]:
    """Return the families that have a log."""
    return root.names(FOLDER)


def read_log(root: Root, family: str) -> Log:
    """Return the records of a family, oldest first. Raises ValueError if one is damaged or missing."""
    return PromotionLog(root, family).records


def last_promotion(root: Root, run: str, artifact: str = "") -> Promotion | None:
    """Return the last judgement on the model of `run`, if any (on `artifact`, if it is given)."""
    family = run.rpartition("-")[0]
    found = judged(read_log(root, family), run, artifact) if family else []
    return found[-1] if found else None


def labels_held(root: Root) -> list[str]:
    """Return the labels of the models that hold an alias of any family by the log."""
    return [label for family in families(root) for label in holders(read_log(root, family)).values()]


def label_held(root: Root, family: str, alias: str) -> str:
    """Return the label of the model of `family` that holds `alias` by the log, empty if none does."""
    return holder(read_log(root, family), alias)


def _signed(record: Promotion) -> Promotion:
    """Return `record` with the signature of the rest of it."""
    data = json.loads(record.model_dump_json(exclude={"signature"}))
    return record.model_copy(update={"signature": signed(KIND, digest_json(data))})


def _name(number: int) -> str:
    return f"{number:08}.json"
