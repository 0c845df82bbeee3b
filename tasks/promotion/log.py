"""The promotion log of a family: append-only, signed records, and the aliases that follow from them.

Functions of `Log` are pure: they read the records, oldest first. `PromotionLog` keeps the records as files and appends
by compare-and-append, so that concurrent promotions never overwrite each other. MLflow only shows what the log says.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.markup import escape

from herd.llama3.evaluate.gate import Decision, Evidence, GateRow
from herd.llama3.recipe.units import tokens
from herd.storage.digests import digest_json, sign, signature_error
from herd.storage.lease import LeaseTiming
from herd.storage.processes import READERS, parallel_map
from herd.storage.root import Root
from herd.tasks.format import FittedTable
from herd.tasks.runs.records import PENDING_APPROVAL, RunRecord

PROMOTED: Literal["promoted"] = "promoted"
REJECTED: Literal["rejected"] = "rejected"
ROLLED_BACK: Literal["rolled back"] = "rolled back"
IMPORTED: Literal["imported"] = "imported"
"""Weights that training started from: the first champion of a family, without a gate."""
MOVED: Literal["moved in MLflow"] = "moved in MLflow"
"""A person moved or deleted the alias in MLflow, where it stays until the next decision; it gives nothing."""
Kind = Literal["promoted", "rejected", "pending_approval", "rolled back", "imported", "moved in MLflow"]
GIVEN = (PROMOTED, ROLLED_BACK, IMPORTED)
"""Kinds that give the alias to the model."""
CANDIDATE, CHAMPION, PREVIOUS = "candidate", "champion", "previous"
CHALLENGER = "challenger"
"""Alias of a model that passed the gate and waits for a person."""
ALIASES = frozenset({CANDIDATE, CHALLENGER, CHAMPION, PREVIOUS})
"""Aliases that only the log gives; a recipe may name one more (`promote.to`)."""
APPROVAL, OVERRIDE = "approval/person", "approval/override"
"""Rows of the gate's table for a person's decision."""


class Promotion(BaseModel):
    """One record: the decision on one model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: int = 0
    """Number in the log, from 1; set by `PromotionLog.append`."""
    previous: str = ""
    """SHA-256 of the document before; empty in the first."""
    id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    """Unique, so that two processes that append record `n` at once can tell whose it is."""
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
    """Label of the checkpoint that held the alias: compared with, or rolled back from. Empty: none did."""
    against: int = 0
    """Number of the newest record when this was decided."""
    gate: Decision | None = None
    """The gate's own decision; None in a record without a gate, such as a rollback."""
    evidence: Evidence | None = None
    """Inputs of the gate: `evidence.decide()` is `gate`."""
    asked: bool = False
    """Whether the recipe wants a person's approval of what passes the gate."""
    override: str = ""
    """Why a person promoted what the gate rejected."""
    by: str = ""
    """Who decided, or started the judgement; empty: the run itself."""
    comment: str = ""
    signature: str = ""
    """By the key of HERD_SIGNING_KEY, of the rest."""

    @property
    def decision(self) -> Decision:
        """The gate's table with the person's row; accepted if the model holds, or held, the alias by this record."""
        rows = self.gate.rows if self.gate else ()
        return Decision(accepted=self.kind in GIVEN, rows=(*rows, *self._person()))

    def _person(self) -> list[GateRow]:
        """Return the row of the person who was asked, or who decided against the gate."""
        by = f" by {self.by or 'somebody'} at {self.time}"
        metric, rule, passed = APPROVAL, "a person approves", self.kind == PROMOTED
        if self.override:
            metric, rule, passed = OVERRIDE, "a person may decide against the gate", True
            reason = f"overridden{by}: {self.override}"
        elif not self.asked or self.gate is None or not self.gate.accepted:
            return []
        elif self.kind == PENDING_APPROVAL:
            reason = "waits for approval by a person"
        else:
            reason = f"{'approved' if passed else 'rejected'}{by}{f': {self.comment}' if self.comment else ''}"
        return [GateRow(metric=metric, rule=rule, passed=passed, reason=reason)]

    @property
    def why(self) -> str:
        """The reason in a line."""
        refusals = "; ".join(self.decision.refusals) if self.kind == REJECTED else ""
        return "; ".join(text for text in (self.override, self.comment, refusals) if text)

    def decided(self, approved: bool, by: str, comment: str, time: str, head: int) -> Promotion:
        """Return the record of a person's decision on a model that waits; `head` is the newest record's number."""
        fresh = {"n": 0, "previous": "", "id": uuid.uuid4().hex, "against": head}
        answer = {"kind": PROMOTED if approved else REJECTED, "by": by, "comment": comment, "time": time}
        return self.model_copy(update={**fresh, **answer})


Log = Sequence[Promotion]
"""Records of one family, oldest first."""


def alias_changes(log: Log, alias: str) -> list[Promotion]:
    """Return the records that gave `alias` to a model; the last names the holder."""
    return [record for record in log if record.alias == alias and record.kind in GIVEN]


def alias_history(log: Log, alias: str) -> list[Promotion]:
    """Return the history of `alias`, oldest first; the last record names the current holder.

    A promotion that was rolled back is removed, so that a second rollback goes further back.
    """
    history: list[Promotion] = []
    for record in alias_changes(log, alias):
        labels = [entry.artifact for entry in history]
        if record.kind == ROLLED_BACK and record.artifact in labels:
            del history[len(labels) - 1 - labels[::-1].index(record.artifact) :]
        elif labels[-1:] == [record.artifact]:
            history.pop()
        history.append(record)
    return history


def current_label(log: Log, alias: str) -> str:
    """Return the label of the model that was given `alias` last, empty if none was."""
    moves = alias_changes(log, alias)
    return moves[-1].artifact if moves else ""


def current_aliases(log: Log) -> dict[str, str]:
    """Return alias -> label of the model that holds it.

    Besides what was promoted to: `candidate`, judged last; `challenger`, waits; `previous`, champion before.
    """
    promoted = {alias: current_label(log, alias) for alias in {record.alias for record in log} - {CANDIDATE, PREVIOUS}}
    labels = {alias: label for alias, label in promoted.items() if label}
    if decisions := gate_decisions(log):
        labels[CANDIDATE] = decisions[-1].artifact
    if len(champions := alias_history(log, CHAMPION)) > 1:
        labels[PREVIOUS] = champions[-2].artifact
    if waiting := [
        record for record in {record.run: record for record in decisions}.values() if record.kind == PENDING_APPROVAL
    ]:
        labels[CHALLENGER] = max(waiting, key=lambda record: record.n).artifact
    return labels


def gate_decisions(log: Log, run: str = "", artifact: str = "") -> list[Promotion]:
    """Return the judgements on models (on those of `run`, on `artifact`): every record with a gate."""
    return [
        record
        for record in log
        if record.kind not in (ROLLED_BACK, IMPORTED, MOVED)
        and run in ("", record.run)
        and artifact in ("", record.artifact)
    ]


def decisive_record(log: Log, label: str) -> Promotion | None:
    """Return the last record that promoted the model `label`; where none did, its last judgement, or its import."""
    imports = [record for record in log if (record.kind, record.artifact) == (IMPORTED, label)]
    records = _promoted(log, label) or gate_decisions(log, artifact=label) or imports
    return records[-1] if records else None


def version_tags(log: Log, label: str) -> dict[str, str]:
    """Return the tags of the registered version of the model `label`: `verdict`, `tokens` and `bpb`."""
    record = decisive_record(log, label)
    if record is None:
        return {}
    return {"verdict": record.kind, "tokens": tokens(record.position), **_bits(record)}


def version_description(log: Log, label: str) -> str:
    """Return in a line what decided on the model `label`: `promoted: run tiny-1, 98.3K tokens, eval/bpb 4.127`."""
    record = decisive_record(log, label)
    if record is None or record.kind == IMPORTED:
        return "" if record is None else f"imported: {record.comment}"
    bits = "".join(f", eval/{name} {value}" for name, value in _bits(record).items())
    return f"{record.kind}: run {record.run}, {tokens(record.position)} tokens{bits}"


def version_history(log: Log, label: str) -> list[str]:
    """Return a line on the last judgement on the model `label` after its promotion, and one on the last rollback."""
    lines, decisions, promoted = [], gate_decisions(log, artifact=label), _promoted(log, label)
    if promoted and decisions[-1] is not promoted[-1]:
        last = decisions[-1]
        against = "itself" if last.champion == label else last.champion or "no champion"
        lines.append(f"Judged again: {last.kind} for {last.run} at {last.time}, against {against}; log number {last.n}")
    if moves := [each for each in log if each.kind == ROLLED_BACK and label in (each.artifact, each.champion)]:
        last = moves[-1]
        comment = f": {last.comment}" if last.comment else ""
        lines.append(
            f"Rolled back: {last.alias} from {last.champion} to {last.artifact} by {last.by} at {last.time}{comment}"
        )
    return lines


def _bits(record: Promotion) -> dict[str, str]:
    score = record.evidence.candidate.get("eval/bpb") if record.evidence else None
    return {"bpb": f"{score.value:.4g}"} if score else {}


def _promoted(log: Log, label: str) -> list[Promotion]:
    """Return the records that promoted the model `label`: in another's place, or confirmed by a person."""
    promotions = [record for record in gate_decisions(log, artifact=label) if record.kind == PROMOTED]
    return [record for record in promotions if record.champion != label or record.asked or record.override]


def decided(record: Promotion, shown: bool) -> str:
    """Return the decision in a line, and whether MLflow shows it (`shown`)."""
    text = {
        PROMOTED: f"{record.run}: promoted, {record.artifact} is the {record.alias}",
        REJECTED: f"{record.run}: rejected, {record.artifact} stays a candidate",
        PENDING_APPROVAL: f"{record.run}: pending approval",
        ROLLED_BACK: f"{record.family}@{record.alias}: rolled back from {record.champion} to {record.artifact}",
        IMPORTED: f"{record.run}: imported, {record.artifact} is the {record.alias}",
        MOVED: f"{record.family}@{record.alias}: {record.comment} in MLflow by {record.by}",
    }[record.kind]
    return text if shown else f"{text}; MLflow does not show it yet: the flow reconcile sends it when it answers"


# `promotions/<family>/<n>.json`, each record written once. Each holds the digest of the one before it, so a changed or
# missing record is found; the loss of the newest is not. With a key (storage/digests.py) the newest must be signed.

FOLDER, KIND = "promotions", "promotion"
_DOCUMENT = re.compile(r"(\d{8})\.json")
_REMEDY = "restore the folder of the log from a copy"
TRIES = 3
"""Reads of a log before it counts as damaged."""


class HeadMoved(RuntimeError):
    """Another record was appended since the decision was made: refresh the log and decide again."""


class PromotionLog:
    """The records of one family, as read, to which one can be appended."""

    def __init__(self, root: Root, family: str, trusted: bool = True) -> None:
        """Read every record. Raises ValueError if one is damaged or missing, or no trusted key signed the newest.

        `trusted=False` skips the check of the signature.
        """
        self.root, self.family, self.trusted = root, family, trusted
        self.records: list[Promotion] = []
        self.head, self._text = "", b""
        """SHA-256 of the newest document, empty before the first; and the document."""
        self.refresh()

    def append(self, record: Promotion, expected_head: str) -> Promotion:
        """Append `record`, decided when the log's head was `expected_head`; return it numbered, chained and signed.

        Raises HeadMoved, with nothing written, if another record came first, and OSError if storage does not answer.
        """
        number = len(self.records) + 1
        if self.head != expected_head:
            raise HeadMoved(f"{self._path(number - 1)}: was appended after the decision; decide again")
        record = record.model_copy(update={"n": number, "previous": expected_head})
        signature = sign(KIND, digest_json(json.loads(record.model_dump_json(exclude={"signature"}))))
        text = record.model_copy(update={"signature": signature}).model_dump_json(indent=1).encode()
        if not self.root.create(text, FOLDER, self.family, f"{number:08}.json"):
            raise HeadMoved(f"{self._path(number)}: was appended by another process; decide again")
        if not self.root.is_local:
            time.sleep(LeaseTiming.grace_s)  # some servers let two writers win: by then the last one shows
        if self._read(number) != text:
            raise OSError(f"{self._path(number)}: holds other bytes than were written; {_REMEDY}")
        self._take(text)
        return self.records[-1]

    def refresh(self) -> None:
        """Read the records that were added since. Raises ValueError as `__init__` does."""
        for tries_left in range(TRIES)[::-1]:
            try:
                self._read_on()
                break
            except ValueError:
                if not tries_left:
                    raise
                self.records, self.head, self._text = [], "", b""  # bits flip in transit too: read all of it again
        if self.trusted and self.records and (why := self.distrusted()):
            raise ValueError(f"{self._path(len(self.records))}: {why}")

    def _read_on(self) -> None:
        """Read the records after those known. Raises ValueError if one is damaged or missing."""
        known = len(self.records)
        names = self.root.names(FOLDER, self.family) if not known else []
        listed = max((int(match[1]) for name in names if (match := _DOCUMENT.fullmatch(name))), default=known)
        for number, text in enumerate(parallel_map(self._read, range(known + 1, listed + 1), READERS), start=known + 1):
            if text is None:
                raise ValueError(f"{self._path(number)}: is missing from the promotion log; {_REMEDY}")
            self._take(text)
        while text := self._read(len(self.records) + 1):  # listings may lag
            self._take(text)
        # Nothing follows the newest that would show a flipped bit; a record appended to it would break the chain.
        if self.records and self._read(len(self.records)) != self._text:
            raise ValueError(f"{self._path(len(self.records))}: two reads differ; {_REMEDY}")

    def sign(self) -> None:
        """Sign the newest record, in a file beside it: records themselves are never changed."""
        self.root.write(sign(KIND, self.head), FOLDER, self.family, f"{len(self.records):08}.signature")

    def distrusted(self) -> str:
        """Return why no trusted key signed the newest record, empty if one did."""
        data = json.loads(self._text)
        own, digest = data.pop("signature", ""), digest_json(data)
        if why := signature_error(KIND, digest, own):
            beside = self.root.read(FOLDER, self.family, f"{len(self.records):08}.signature") or b""
            return why if signature_error(KIND, self.head, beside.decode(errors="replace")) else ""
        return ""

    def _read(self, number: int) -> bytes | None:
        return self.root.read(FOLDER, self.family, f"{number:08}.json")

    def _take(self, text: bytes) -> None:
        """Add a document that was read. Raises ValueError unless it follows the one before."""
        number = len(self.records) + 1
        try:
            record = Promotion.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(f"{self._path(number)}: is not a promotion record; {_REMEDY}") from error
        if (record.n, record.previous) != (number, self.head):
            raise ValueError(f"{self._path(number)}: does not follow the record before it, one was changed; {_REMEDY}")
        if record.family != self.family:
            raise ValueError(f"{self._path(number)}: is a record of the family {record.family}; {_REMEDY}")
        self.records.append(record)
        self._text = text
        self.head = hashlib.sha256(text).hexdigest()

    def _path(self, number: int) -> str:
        return f"{FOLDER}/{self.family}/{number:08}.json"


def families(root: Root) -> list[str]:
    """Return the families that have a log."""
    return root.names(FOLDER)


def read_log(root: Root, family: str) -> Log:
    """Return the records of a family, oldest first. Raises ValueError if one is damaged or missing."""
    return PromotionLog(root, family).records


def last_promotion(root: Root, run: str, artifact: str = "") -> Promotion | None:
    """Return the last judgement on the model of `run`, if any (on `artifact`, if it is given)."""
    family = run.rpartition("-")[0]
    decisions = gate_decisions(read_log(root, family), run, artifact) if family else []
    return decisions[-1] if decisions else None


def aliased_labels(root: Root) -> list[str]:
    """Return the labels of the models that hold an alias of any family by the log."""
    return [label for family in families(root) for label in current_aliases(read_log(root, family)).values()]


def logged_label(root: Root, family: str, alias: str) -> str:
    """Return the label of the model of `family` that holds `alias` by the log, empty if none does."""
    return current_aliases(read_log(root, family)).get(alias, "")


def promotion_document(root: Root, family: str) -> dict[str, Any]:
    """Return the log as plain values, oldest first. Raises ValueError as `promotion_table`."""
    log = _known_log(root, family)
    records = [{**record.model_dump(exclude={"evidence", "signature"}), "why": record.why} for record in log]
    return {"family": family, "aliases": current_aliases(log), "records": records}


def _known_log(root: Root, family: str) -> Log:
    log = read_log(root, family)
    if not log:
        known = ", ".join(families(root)) or "none yet"
        raise ValueError(f"family {family!r} has no promotions under {root.uri}; families: {known}")
    return log


COLUMNS = ("n", "time", "decision", "model", "holds", "by", "why")


def promotion_table(root: Root, family: str) -> FittedTable:
    """Return the log as a table for the terminal, oldest first.

    Raises ValueError if the family has no log, or it is damaged.
    """
    log = _known_log(root, family)
    aliases: dict[str, list[str]] = {}
    for alias, label in sorted(current_aliases(log).items()):
        aliases.setdefault(label, []).append(alias)
    newest = {record.artifact: record.n for record in log}
    table = FittedTable("", COLUMNS, left_out=("why", "by", "holds", "time"), numbers=("n",))
    for record in log:
        time, model = record.time[:16].replace("T", " "), record.artifact.rpartition("/")[2]
        what = record.kind if record.alias == CHAMPION else f"{record.kind} ({record.alias})"
        holds = ", ".join(aliases.get(record.artifact, []) if newest[record.artifact] == record.n else [])
        cells = (str(record.n), time, what, model, holds, record.by or record.run, record.why)
        table.add_row(*map(escape, cells))
    return table


def compared_run(root: Root, record: RunRecord) -> str:
    """Return the run to compare `record` with: it is a rerun of it, or was judged against its model; empty: none."""
    promotion = None if record.rerun_of else last_promotion(root, record.name)
    if promotion is None:
        return record.rerun_of
    champions = [judged.run for judged in read_log(root, record.family) if judged.artifact == promotion.champion]
    return next((run for run in champions if run != record.name), "")
