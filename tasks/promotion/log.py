"""The promotion log of a family: its records, who holds which alias by them, and the files that keep them.

Everything above `PromotionLog` is a pure function of the records, oldest first. A rolled-back promotion is removed from
the alias history, so a second rollback moves further back. A person's approval or override is one more row of the
gate's table; the gate's own decision stays as it was made, with the evidence that replays it.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.markup import escape
from rich.table import Table

from llama3.evaluate.gate import Decision, Evidence, GateRow
from llama3.recipe.units import tokens
from storage.digests import READERS, digest_json, each
from storage.root import Root
from storage.signing import distrust, signed

PROMOTED: Literal["promoted"] = "promoted"
REFUSED: Literal["refused"] = "refused"
WAITS: Literal["waits for approval"] = "waits for approval"
ROLLED_BACK: Literal["rolled back"] = "rolled back"
Kind = Literal["promoted", "refused", "waits for approval", "rolled back"]
CANDIDATE, CHAMPION, PREVIOUS = "candidate", "champion", "previous"
CHALLENGER = "challenger"
"""Alias of a model that passed the gate and waits for a person."""
ALIASES = frozenset({CANDIDATE, CHALLENGER, CHAMPION, PREVIOUS})
"""Those that only the log decides on; a recipe may name one more (`promote.to`)."""
APPROVAL, OVERRIDE = "approval/person", "approval/override"
"""Rows of the gate's table for what a person decided."""


class Promotion(BaseModel):
    """One record: what was decided about one model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: int = 0
    """Place in the log, from 1; given when it is appended."""
    previous: str = ""
    """SHA-256 of the document before; empty in the first."""
    id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    """Tells this record from any other that wants the same place."""
    time: str
    """ISO 8601, UTC."""
    kind: Kind
    run: str
    family: str
    artifact: str
    """Label of the checkpoint."""
    digest: str
    """SHA-256 of the model's weights."""
    position: int
    alias: str
    """What the model is, or would have been, promoted to."""
    champion: str = ""
    """Label of the checkpoint that held the alias: judged against, or rolled back from. Empty: none did."""
    against: int = 0
    """Place of the newest record when this was decided."""
    gate: Decision | None = None
    """As the gate made it; None in a rollback, on which no gate decides."""
    evidence: Evidence | None = None
    """What the gate saw: `evidence.decide()` is `gate`."""
    asked: bool = False
    """Whether the recipe wants a person's approval of what passes the gate."""
    override: str = ""
    """Why a person promoted what the gate refused."""
    by: str = ""
    """Who decided, or started the judgement; empty: the run itself."""
    comment: str = ""
    signature: str = ""
    """By the key of HERD_SIGNING_KEY, of the rest."""

    @property
    def decision(self) -> Decision:
        """The gate's table with the person's row; accepted if the model holds, or held, the alias by this record."""
        rows = self.gate.rows if self.gate else ()
        return Decision(accepted=self.kind in (PROMOTED, ROLLED_BACK), rows=(*rows, *self._person()))

    @property
    def tags(self) -> dict[str, str]:
        """What the registered version says of the decision."""
        rows = {f"gate.{row.metric}".replace("/", "."): _told(row) for row in self.decision.rows}
        return {"verdict": self.kind, **rows}

    @property
    def why(self) -> str:
        """The reason in a line."""
        refusals = "; ".join(self.decision.refusals) if self.kind == REFUSED else ""
        return "; ".join(text for text in (self.override, self.comment, refusals) if text)

    def decided(self, approved: bool, by: str, comment: str, time: str, head: int) -> Promotion:
        """Return the record of what a person decided on a model that waits."""
        fresh = {"n": 0, "previous": "", "id": uuid.uuid4().hex, "against": head}
        said = {"kind": PROMOTED if approved else REFUSED, "by": by, "comment": comment, "time": time}
        return self.model_copy(update={**fresh, **said})

    def _person(self) -> list[GateRow]:
        """Return the row of the person who was asked, or who decided against the gate."""
        said = f" by {self.by or 'somebody'} at {self.time}"
        if self.override:
            return [_row(OVERRIDE, "a person may decide against the gate", True, f"overridden{said}: {self.override}")]
        if not self.asked or self.gate is None or not self.gate.accepted:
            return []
        if self.kind == WAITS:
            return [_row(APPROVAL, "a person approves", False, "waits for approval by a person")]
        comment = f": {self.comment}" if self.comment else ""
        word = "approved" if self.kind == PROMOTED else "refused"
        return [_row(APPROVAL, "a person approves", self.kind == PROMOTED, f"{word}{said}{comment}")]


Log = Sequence[Promotion]
"""Records of one family, oldest first."""


def changes(log: Log, alias: str) -> list[Promotion]:
    """Return the records that gave `alias` to a model; the last names the holder."""
    return [record for record in log if _changes(record, alias)]


def reigns(log: Log, alias: str) -> list[Promotion]:
    """Return the records by which models hold, or held, `alias`, the holder's last; those rolled back from left out."""
    pile: list[Promotion] = []
    for record in changes(log, alias):
        labels = [reign.artifact for reign in pile]
        if record.kind == ROLLED_BACK and record.artifact in labels:
            del pile[len(labels) - 1 - labels[::-1].index(record.artifact) :]
        elif labels[-1:] == [record.artifact]:
            pile.pop()
        pile.append(record)
    return pile


def holder(log: Log, alias: str) -> str:
    """Return the label of the model that holds `alias`, empty if none does."""
    return holders(log).get(alias, "")


def reigning(log: Log, alias: str) -> str:
    """Return the label of the model to which `alias` was promoted (or rolled back) last, empty if none was."""
    moved = (record for record in reversed(log) if _changes(record, alias))
    return next((record.artifact for record in moved), "")


def holders(log: Log) -> dict[str, str]:
    """Return alias -> label of the model that holds it.

    Besides what was promoted to: `candidate`, judged last; `challenger`, waits; `previous`, champion before.
    """
    held = {alias: reigning(log, alias) for alias in {record.alias for record in log}}
    held = {alias: label for alias, label in held.items() if label and alias not in ALIASES - {CHAMPION, CHALLENGER}}
    if judgements := judged(log):
        held[CANDIDATE] = judgements[-1].artifact
    if len(champions := reigns(log, CHAMPION)) > 1:
        held[PREVIOUS] = champions[-2].artifact
    if waiting := [record for record in {record.run: record for record in judgements}.values() if record.kind == WAITS]:
        held[CHALLENGER] = max(waiting, key=lambda record: record.n).artifact
    return held


def judged(log: Log, run: str = "", artifact: str = "") -> list[Promotion]:
    """Return the judgements on models (on those of `run`, on `artifact`): every record but rollbacks."""
    return [
        record
        for record in log
        if record.kind != ROLLED_BACK and run in ("", record.run) and artifact in ("", record.artifact)
    ]


def version_tags(log: Log, label: str) -> dict[str, str]:
    """Return what the registered version of the model `label` says of itself: the evidence that promoted it.

    A judgement after that does not touch it and is told in a tag of its own. Of a model that was never promoted it is
    the newest judgement.
    """
    decisions, promoted = judged(log, artifact=label), _promoted(log, label)
    moved = [record for record in log if record.kind == ROLLED_BACK and label in (record.artifact, record.champion)]
    tags = dict((promoted or decisions)[-1].tags) if decisions else {}
    if promoted and decisions[-1] is not promoted[-1]:
        last = decisions[-1]
        against = "itself" if last.champion == label else last.champion or "no champion"
        tags["judged_again"] = f"{last.kind} for {last.run} at {last.time}, against {against}; log number {last.n}"
    return {**tags, "rollback": _rollback(moved[-1])} if moved else tags


def version_description(log: Log, label: str) -> str:
    """Return in a line what decided on the model `label`: `promoted: run tiny-1, 98.3K tokens, eval/bpb 4.127`."""
    decisions = _promoted(log, label) or judged(log, artifact=label)
    if not decisions:
        return ""
    last = decisions[-1]
    score = last.evidence.candidate.get("eval/bpb") if last.evidence else None
    bits = f", eval/bpb {score.value:.4g}" if score else ""
    return f"{last.kind}: run {last.run}, {tokens(last.position)} tokens{bits}"


def _promoted(log: Log, label: str) -> list[Promotion]:
    """Return the records that promoted the model `label`: in another's place, or confirmed by a person."""
    found = [one for one in judged(log, artifact=label) if one.kind == PROMOTED]
    return [one for one in found if one.champion != label or one.asked or one.override]


def decided(record: Promotion, shown: bool) -> str:
    """Return in a line what was decided, and whether MLflow (`shown`) knows it."""
    said = {
        PROMOTED: f"{record.run}: promoted, {record.artifact} is the {record.alias}",
        REFUSED: f"{record.run}: refused, {record.artifact} stays a candidate",
        WAITS: f"{record.run}: waits for approval",
        ROLLED_BACK: f"{record.family}@{record.alias}: rolled back from {record.champion} to {record.artifact}",
    }[record.kind]
    return said if shown else f"{said}; MLflow does not show it yet: the flow reconcile sends it when it answers"


def _changes(record: Promotion, alias: str) -> bool:
    return record.alias == alias and record.kind in (PROMOTED, ROLLED_BACK)


def _rollback(record: Promotion) -> str:
    comment = f": {record.comment}" if record.comment else ""
    return f"{record.alias} from {record.champion} to {record.artifact} by {record.by} at {record.time}{comment}"


def _told(row: GateRow) -> str:
    return row.reason if row.checked else f"{row.verdict}: {row.reason}"


def _row(metric: str, rule: str, passed: bool, reason: str) -> GateRow:
    return GateRow(
        metric=metric, rule=rule, candidate=None, champion=None, threshold=None, passed=passed, reason=reason
    )


# `promotions/<family>/<n>.json`, each record written once. It is the only truth about the champion; MLflow shows it. A
# record is added by a conditional write (`Root.create`): of several promoters that decided against one head one wins,
# the others read the new record and decide again. Each record holds the digest of the one before it, so a changed or
# missing record is found; the loss of the newest is not. With a key (storage/signing.py) the newest record must be
# signed.

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


# The promotion log of a family as a table for the terminal: what was decided, on which model, by whom and why.

COLUMNS = ("n", "time", "what", "model", "holds", "by", "why")


def promotion_table(root: Root, family: str) -> Table:
    """Return the table, oldest first. Raises ValueError if the family has no log, or it is damaged."""
    log = read_log(root, family)
    if not log:
        known = ", ".join(families(root)) or "none yet"
        raise ValueError(f"family {family!r} has no promotions under {root.uri}; families: {known}")
    held: dict[str, list[str]] = {}
    for alias, label in sorted(holders(log).items()):
        held.setdefault(label, []).append(alias)
    newest = {record.artifact: record.n for record in log}
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold", no_wrap=column != "why")
    for record in log:
        aliases = held.get(record.artifact, []) if newest[record.artifact] == record.n else []
        table.add_row(*map(escape, _cells(record, aliases)))
    return table


def _cells(record: Promotion, aliases: list[str]) -> list[str]:
    by, model = record.by or record.run, record.artifact.rpartition("/")[2]
    time = record.time[:16].replace("T", " ")
    what = record.kind if record.alias == CHAMPION else f"{record.kind} ({record.alias})"
    return [str(record.n), time, what, model, ", ".join(aliases), by, record.why]
