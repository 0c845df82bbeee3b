"""What a run will do, before it does anything: the stage table, totals, FLOPs, warnings; and the files it downloads.

The plan is computed from the recipe alone; only the surveys of sources and evaluation data look at the disk. `herd
fetch` downloads what a recipe names elsewhere: see `remote_addresses`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from herd.llama3.data.readers.conversations import BUILT_IN_CONVERSATIONS, ConversationSurvey
from herd.llama3.data.readers.files import File, list_source
from herd.llama3.data.readers.records import UNREAD
from herd.llama3.data.readers.sources import (
    BUILT_IN,
    DomainSurvey,
    check_sources,
    reaches_limit,
    survey,
    text_per_byte,
)
from herd.llama3.evaluate.checks import RulePower, check_evaluation, gate_powers, joint_chance
from herd.llama3.evaluate.held_out import nothing_held_out
from herd.llama3.evaluate.suite import all_tasks
from herd.llama3.evaluate.task_yaml import MissingFile
from herd.llama3.model.flops import flops_per_token, parameter_count, recipe_vocab_size
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import Load, RankMemory, average_bytes, memory, memory_line
from herd.llama3.recipe.base import DOMAINS, Domain
from herd.llama3.recipe.data_schema import (
    HELD_OUT_BYTES,
    HELD_OUT_CUT,
    HELD_OUT_DOCUMENTS,
    HELD_OUT_MOST,
    Source,
    few_held_out,
)
from herd.llama3.recipe.lint import PLACEHOLDER, lint, placeholders
from herd.llama3.recipe.schedule import Schedule, StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import Tokens, tokens
from herd.llama3.tokens.mix import mix_datasets
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.storage.fetch import Target, check_space, copies_folder, download, missing_bytes, prepare, use_fetched
from herd.storage.filesystem import FetchedFile, StoreError, fetched_folder, fetched_listing, is_local
from herd.storage.root import Root
from herd.tasks.format import format_bytes
from herd.tasks.models.start import known_tokenizer

MOST_TOKENS_PER_BYTE = 1 / 1.5
"""No tokenizer of ours made more tokens from a domain's text; a usual one makes 1 per 4 bytes of English."""
USUAL_TOKENS_PER_BYTE = 1 / 4
TOKENS_PER_MESSAGE = 5
"""Of the chat format around a content."""
SURELY = 3.0
"""A shortage of conversations by this factor is certain: estimates and padding are never so far off."""


@dataclass(frozen=True)
class RunPlan:
    recipe: Recipe
    schedule: Schedule
    vocab_size: int
    """Ids: base vocabulary and special tokens."""
    warnings: list[str]
    sources: list[DomainSurvey]
    conversations: Sequence[ConversationSurvey] = ()
    gate: Sequence[RulePower] = ()
    """What the rules of `promote.when` can show."""
    tokenizer: str = ""
    """The tokenizer in a line; empty: in the Llama 3 format, or not known."""

    def __repr__(self) -> str:  # the last line of a notebook's cell would print the whole recipe
        sizes = f"{tokens(self.parameters)} parameters, {tokens(self.schedule.tokens)} tokens"
        return f"<plan of {self.recipe.name}: {sizes}>"

    @property
    def parameters(self) -> int:
        return parameter_count(self.recipe.model, self.vocab_size)

    def flops(self) -> tuple[float, float]:
        """Return the run's FLOPs as 6N per token, and with causal attention counted."""
        model, segments = self.recipe.model, [segment for span in self.schedule.trained for segment in span.segments]
        pairs = [(segment.tokens, flops_per_token(model, self.vocab_size, segment.seq_len)) for segment in segments]
        return sum(n * dense for n, (dense, _) in pairs), sum(n * causal for n, (_, causal) in pairs)


def make_plan(
    recipe: Recipe,
    sources: list[DomainSurvey],
    left_out: Sequence[str] = (),
    conversations: Sequence[ConversationSurvey] = (),
    tokenizer: Tokenizer | None = None,
    surroundings: Sequence[str] = (),
) -> RunPlan:
    """Return the plan of `recipe`, given what surveys found in its sources and which tasks lack their data.

    `tokenizer` is the recipe's, if it is known already; `surroundings` are warnings about the place of the run.
    """
    vocab_size = tokenizer.vocab_size if tokenizer else recipe_vocab_size(recipe)
    short = [fault for source in sources if (fault := data_shortage(recipe, source, USUAL_TOKENS_PER_BYTE))]
    lacking = [f"evaluate: leaves out {line}" for line in left_out]
    gate = _rule_powers(recipe, sources)
    weak = [line for power in gate if (line := power.warning())]
    warnings = [
        *placeholders(recipe), *lint(recipe), *short, *conversation_shortage(recipe, conversations), *lacking, *weak
    ]  # fmt: skip
    warnings = [*surroundings, *warnings]
    line = "" if tokenizer is None or tokenizer.base else tokenizer.summary()
    return RunPlan(recipe, recipe.schedule, vocab_size, warnings, sources, conversations, gate, line)


def _rule_powers(recipe: Recipe, sources: Sequence[DomainSurvey]) -> list[RulePower]:
    known = {source.domain: held_out(recipe, source)[0] for source in sources if source.complete and not source.name}
    return gate_powers(recipe, is_local(recipe.evaluate.data or ""), known)


def survey_and_plan(recipe: Recipe, root: Root) -> RunPlan:
    """Return the plan of `recipe` with what is found on this machine; of remote sources, fetched copies are read.

    What would end a run here is a warning: the run may be for another machine.
    """
    use_fetched(root)
    tokenizer = known_tokenizer(root, recipe)
    chats = survey_chats(recipe, tokenizer, remote=False)
    plan = make_plan(recipe, survey(recipe), survey_evaluation(recipe), chats, tokenizer)
    scarce = scarce_held_out(recipe, plan.sources) if recipe.curate.validation_fraction else [nothing_held_out(recipe)]
    return replace(plan, warnings=[*_local_faults(recipe), *scarce, *plan.warnings])


def held_out(recipe: Recipe, source: DomainSurvey) -> tuple[int, float]:
    """Return about how many documents and bytes of a source are held out, before curation drops any."""
    share, documents = recipe.curate.validation_fraction, source.documents
    if source.name or not share or not source.bytes:
        return 0, 0.0
    size = source.bytes / documents
    enough = math.ceil(HELD_OUT_BYTES / min(size, HELD_OUT_CUT))
    least = zip((HELD_OUT_DOCUMENTS, enough), HELD_OUT_MOST, strict=True)
    count = max(round(documents * share), *(min(wanted, documents // most) for wanted, most in least))
    return count, count * size


def scarce_held_out(recipe: Recipe, sources: Sequence[DomainSurvey]) -> list[str]:
    """Return a line for each domain that is known whole and has too few documents to judge a model by."""
    known = (source for source in sources if source.complete and not source.name and source.documents)
    lines = (few_held_out(f"sources.{source.domain}", *held_out(recipe, source)) for source in known)
    return list(filter(None, lines))


def _local_faults(recipe: Recipe) -> list[str]:
    """Return the faults of the sources of each domain that has only local ones without placeholders."""
    local = {
        domain: sources
        for domain, sources in recipe.sources.items()
        if all(
            is_local(source.uri) and not source.contents and not PLACEHOLDER.search(source.uri) for source in sources
        )
    }
    faults = check_sources(recipe.model_copy(update={"sources": local}))
    return [fault for fault in faults if fault.startswith("sources.")]


def survey_evaluation(recipe: Recipe) -> list[str]:
    """Return a line for each task that lacks its data on this machine; what is remote is looked at when a run begins.

    Raises ValueError as `check_evaluation`, which looks at the first rows of each file here.
    """
    return check_evaluation(recipe, look=is_local(recipe.evaluate.data or ""))


def survey_chats(recipe: Recipe, tokenizer: Tokenizer | None, remote: bool = True) -> list[ConversationSurvey]:
    """Return the amount of conversations of each source; their tokens with `tokenizer`. Raises SourceError."""
    from herd.llama3.data.readers.conversations import survey_conversations
    from herd.llama3.tokens.chat import encode_chat

    count = None if tokenizer is None else lambda messages: len(encode_chat(tokenizer, messages, False))
    return survey_conversations(recipe.conversations, recipe.documents_seed, remote, count)


def tokens_needed(recipe: Recipe, domain: Domain, name: str = "") -> int:
    """Return how many tokens the whole run trains on: of the source `name`, or of all unnamed ones."""
    apart = recipe.named_sources

    def share(span: StageSpan) -> Fraction:
        added = {one: Fraction(of_one) for one, of_one in span.stage.extra_sources.items() if apart[one] == domain}
        return added.get(name, Fraction(0)) if name else span.shares.get(domain, Fraction(0)) - sum(added.values())

    return round(sum(span.tokens * share(span) for span in recipe.schedule.spans))


def data_shortage(recipe: Recipe, source: DomainSurvey, tokens_per_byte: float) -> str:
    """Return the remedy if a domain has too little text under the epoch limit; "" if it has enough."""
    needed, once = (
        tokens_needed(recipe, source.domain, source.name),
        source.bytes * tokens_per_byte,
    )
    if needed <= once * recipe.tokens.max_epochs or not source.complete:
        return ""
    return (
        f"sources.{source.title}: {format_bytes(source.bytes)} of text are about {tokens(once)} tokens; "
        f"the run takes {tokens(needed)}, more than tokens.max_epochs {recipe.tokens.max_epochs:g} allows; "
        f"add text, lower the share of {source.title}, or shorten the run"
    )


def conversation_shortage(
    recipe: Recipe, conversations: Sequence[ConversationSurvey], factor: float = 1.0
) -> list[str]:
    """Return a line for each stage of kind `sft` with more passes over its conversations than `factor` x the limit."""
    once, limit, lines = conversation_tokens(recipe, conversations), recipe.tokens.max_epochs, []
    for span in recipe.schedule.spans:
        if span.stage.kind != "sft" or span.stage.epochs or not once:
            continue
        passes, batch = (span.tokens - span.mix_tokens) / once, span.segments[0].batch
        if passes > factor * limit:
            fitting = max(1, int(span.tokens * limit / passes / batch)) * batch
            lines.append(
                f"stages.{span.name}.for: {Tokens(span.tokens)} tokens are about {passes:.3g} passes over the "
                f"conversations, at most tokens.max_epochs {limit:g}; write for: {Tokens(fitting)}, add conversations, "
                "or write epochs"
            )
    return lines


def conversation_tokens(recipe: Recipe, conversations: Sequence[ConversationSurvey]) -> float:
    """Return about how many tokens of conversations there are to train on; 0 if a source was not looked at."""
    total = sum(map(_tokens_of, conversations)) if all(chats.complete for chats in conversations) else 0.0
    return total * (1 - float(recipe.curate.validation_fraction))


def _tokens_of(chats: ConversationSurvey) -> float:
    return chats.tokens or chats.bytes * USUAL_TOKENS_PER_BYTE + chats.messages * TOKENS_PER_MESSAGE


HEADERS = ("stage", "from", "tokens", "steps", "seq_len", "batch", "lr", "mix")


def stage_rows(plan: RunPlan) -> list[tuple[str, ...]]:
    """Return the stage table as text, a row per stage under `HEADERS`."""
    return [_row(plan, span) for span in plan.schedule.spans]


def stage_table(plan: RunPlan) -> Table:
    """Return the stage table for a console."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for header in HEADERS:
        table.add_column(header, justify="left" if header in ("stage", "lr", "mix") else "right", no_wrap=True)
    for row in stage_rows(plan):
        table.add_row(*row)
    return table


def _row(plan: RunPlan, span: StageSpan) -> tuple[str, ...]:
    schedule = plan.schedule
    lengths = span.stage.lengths
    seq_len = str(lengths[0]) if len(lengths) == 1 else f"{Tokens(lengths[0])}..{Tokens(lengths[-1])}"
    last = span.segments[-1]
    first_rate, last_rate = schedule.lr_at(span.start), schedule.lr_at(span.end - last.batch)
    shares = "/".join(f"{float(span.shares.get(domain, Fraction(0)) * 100):g}" for domain in DOMAINS)
    shares += "".join(f" with {share} {name}" for name, share in span.stage.extra_sources.items())
    if span.stage.kind == "sft":
        shares = "conversations" + (f" with {span.stage.replay} {span.stage.mix}" if span.stage.replay else "")
    return (
        span.name,
        tokens(span.start),
        tokens(span.tokens),
        f"{span.steps:,}",
        seq_len,
        str(Tokens(last.batch)),
        f"{_rate(first_rate)} > {_rate(last_rate)}" if span in schedule.spans[schedule.given :] else "not trained",
        shares,
    )


def _rate(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def summary_lines(plan: RunPlan) -> list[str]:
    """Return the totals below the stage table, one fact a line."""
    dense, causal = plan.flops()
    model = plan.recipe.model
    lines = [
        f"model    {tokens(plan.parameters)} parameters: {model.layers} layers, dim {model.dim}, {model.heads} heads / "
        f"{model.kv_heads} KV, FFN {model.ffn}, vocabulary {plan.vocab_size:,}",
        f"total    {tokens(plan.schedule.tokens)} tokens in {plan.schedule.steps:,} steps",
        f"FLOPs    {causal:.3g} (6N + causal attention); {dense:.3g} (6N, N without the embedding table)",
    ]
    if plan.tokenizer:
        lines.insert(1, f"tokens   {plan.tokenizer}")
    if plan.recipe.init_from is not None:
        trained = plan.schedule.tokens - plan.schedule.trained[0].start
        lines.append(f"start    from {plan.recipe.init_from.path}; {tokens(trained)} tokens are trained here")
    for source in plan.sources:
        lines.append(f"source   {source.title}: {_survey_line(plan.recipe, source)}")
    lines += _rule_lines(plan.recipe)
    lines += _gate_lines(plan.gate)
    lines += copies_lines(plan.recipe)
    for chats in plan.conversations:
        amount = f"{chats.conversations:,} in {chats.messages:,} messages, {format_bytes(chats.bytes)}"
        amount += f", about {tokens(_tokens_of(chats))} tokens" if chats.complete else ""
        lines.append(f"chats    {chats.name}: {amount if chats.complete else 'not looked at (remote)'}")
    if once := conversation_tokens(plan.recipe, plan.conversations):
        for span in (span for span in plan.schedule.spans if span.stage.kind == "sft"):
            replayed = f", replay {span.stage.replay} of {span.stage.mix}" if span.stage.replay else ""
            lines.append(f"epochs   {span.name}: about {(span.tokens - span.mix_tokens) / once:.2g}{replayed}")
    return lines


def _rule_lines(recipe: Recipe) -> list[str]:
    """Return the document rules that each domain gets, and each language with rules of its own."""
    found: dict[str, list[str]] = {}
    for domain in recipe.sources:
        found.setdefault(recipe.curate.quality_of(domain, "").describe(), []).append(domain)
    for language in (key for key in recipe.curate.quality_for if key not in DOMAINS):
        for domain in ("general", "multilingual"):
            if domain in recipe.sources:
                text = recipe.curate.quality_of(domain, language).describe()
                found.setdefault(text, []).append(f"{domain} in {language}")
    return [f"rules    {', '.join(names)}: {text}" for text, names in found.items()]


def _gate_lines(gate: Sequence[RulePower]) -> list[str]:
    metrics: dict[str, list[str]] = {}
    for power in gate:
        metrics.setdefault(power.describe(), []).append(power.metric)
    lines = [f"gate     {', '.join(names)}: {text}" for text, names in metrics.items()]
    if sum(power.is_veto for power in gate) > 1:
        chances = zip(("better", "equal", "worse"), (-1, 0, 1), strict=True)
        passes = ", ".join(f"{name} {joint_chance(gate, sign):.0%}" for name, sign in chances)
        lines.append(f"gate     all of these, `better` aside; passes: {passes}")
    return lines


def _survey_line(recipe: Recipe, source: DomainSurvey) -> str:
    if not source.complete and not source.documents:
        return (
            f"not looked at (remote); the run takes {tokens(tokens_needed(recipe, source.domain, source.name))} tokens"
        )
    least = "" if source.complete else "at least "
    generated = f", {source.generated / source.bytes:.0%} of it generated problems" if source.generated else ""
    unread = f"; cannot be read: {source.left_out}" if source.left_out else ""
    count, size = held_out(recipe, source)
    kept = f", about {count:,} ({format_bytes(size)}) held out" if count and source.complete else ""
    return f"{least}{format_bytes(source.bytes)} in {source.documents:,} documents{kept}{generated}{unread}"


def plan_document(plan: RunPlan) -> dict[str, Any]:
    """Return the values of the stage table and of the lines below it."""
    model, (dense, causal), schedule = plan.recipe.model, plan.flops(), plan.schedule
    fields = ("layers", "dim", "ffn", "heads", "kv_heads")
    return {
        "recipe": plan.recipe.name,
        "model": {
            "parameters": plan.parameters,
            "vocab_size": plan.vocab_size,
            **{name: getattr(model, name) for name in fields},
        },
        "tokens": schedule.tokens,
        "steps": schedule.steps,
        "flops": {"6n": dense, "6n_causal_attention": causal},
        "schedule": [
            {
                "stage": span.name,
                "kind": span.stage.kind,
                "from": span.start,
                "tokens": span.tokens,
                "steps": span.steps,
                "seq_len": list(span.stage.lengths),
                "batch": span.segments[-1].batch,
                "lr": [schedule.lr_at(span.start), schedule.lr_at(span.end - span.segments[-1].batch)],
                "mix": {domain: float(share) for domain, share in span.shares.items()},
            }
            for span in schedule.spans
        ],
        "sources": [
            {
                **asdict(source),
                "tokens_needed": tokens_needed(plan.recipe, source.domain, source.name),
            }
            for source in plan.sources
        ],
        "gate": [
            {
                "metric": power.metric,
                "rule": str(power.rule),
                "n": power.size.n,
                "shows": power.shows,
                "passes": {
                    "better": power.chance(-power.gain),
                    "equal": power.chance(),
                    "worse": power.chance(power.gain),
                },
            }
            for power in plan.gate
        ],
        "warnings": plan.warnings,
    }


def memory_lines(plan: RunPlan, layout: Layout, processes: int, micro_batch: int) -> list[str]:
    """Return the memory of the fullest process at each sequence length."""
    needs: dict[int, list[RankMemory]] = defaultdict(list)
    for segment in plan.schedule.segments:
        count = max(1, segment.batch // (segment.seq_len * layout.dp(processes) * micro_batch))
        average = average_bytes(plan.recipe, segment)
        load = Load(segment.seq_len, micro_batch, count, plan.recipe.precision, average=average)
        needs[segment.seq_len] += memory(plan.recipe.model, plan.vocab_size, layout, processes, load)
    return [
        f"memory   {memory_line(max(ranks, key=lambda need: need.total))} (sequences of {seq_len:,})"
        for seq_len, ranks in sorted(needs.items())
    ]


def plan_markdown(plan: RunPlan) -> str:
    """Return the plan as markdown, for Prefect's page of the run."""
    head = "| stage | from | tokens | steps | seq_len | batch | lr | mix |\n|---|---|---|---|---|---|---|---|"
    rows = ["| " + " | ".join(row) + " |" for row in stage_rows(plan)]
    facts = [f"- {line}" for line in summary_lines(plan)]
    warnings = [f"- warning: {warning}" for warning in plan.warnings]
    return "\n".join([f"# Plan of {plan.recipe.name}", "", head, *rows, "", *facts, *warnings])


# What a recipe names elsewhere, and its download.

Listed = list[tuple[str, dict[str, Any]]]


@dataclass
class RemoteAddress:
    """A field of the recipe that names files elsewhere."""

    field: str
    uri: str
    choose: Callable[[Listed], Iterable[str]] = lambda listed: [uri for uri, _ in listed]
    """Returns the files that the recipe reads of those that the address names."""
    source: Source | None = None
    domain: Domain | None = None
    first: int = 0
    """Files of a source with a limit that are downloaded, in order; 0: all."""
    target: Target | None = None
    tokens: float = 0
    """About, of a source, as `fetch_lines` sampled it."""


def remote_addresses(recipe: Recipe) -> list[RemoteAddress]:
    """Return the addresses of sources, evaluation sets, tokenizer, start weights and curation that are not here."""
    return [address for address in _addresses(recipe) if not is_local(address.uri)]


def _addresses(recipe: Recipe) -> Iterator[RemoteAddress]:
    for domain, sources in recipe.sources.items():
        for index, source in enumerate(sources):
            if source.uri not in BUILT_IN:
                address = RemoteAddress(f"sources.{domain}.{index}", source.uri, source=source, domain=domain)
                address.choose = partial(_documents, address)
                yield address
    for index, conversations in enumerate(recipe.conversations):
        if conversations.uri not in BUILT_IN_CONVERSATIONS:
            source = Source(uri=conversations.uri, ignore=conversations.ignore)
            address = RemoteAddress(f"conversations.{index}", conversations.uri)
            address.choose = partial(_documents, RemoteAddress(address.field, address.uri, source=source))
            yield address
    curate = recipe.curate
    named = {"block": curate.block, "dirty_words": curate.dirty_words}
    named |= {f"scores.{score.name}": [*score.good, *score.bad] for score in curate.scores}
    named |= {f"topics.seeds.{topic}": files for topic, files in (curate.topics.seeds if curate.topics else {}).items()}
    named |= {f"decontaminate.{one.name}": [one.uri] for one in curate.decontaminate if one != "evaluated"}
    yield from (RemoteAddress(f"curate.{field}", uri) for field, uris in named.items() for uri in uris)
    for task in all_tasks(recipe):
        if not isinstance(task.definition, Path):
            with suppress(MissingFile):  # the checks of the run tell
                for name in dict.fromkeys(task.definition.files):
                    yield RemoteAddress("evaluate.data", task.data_paths.uri(name))
    if recipe.tokenizer.use:
        yield RemoteAddress("tokenizer.use", recipe.tokenizer.use)
    if (start := recipe.init_from) is not None and not start.is_checkpoint and not is_local(start.path):
        from herd.llama3.export.convert import start_files  # imports torch

        yield RemoteAddress("init_from.path", start.path, lambda listed: start_files(start, [uri for uri, _ in listed]))


def _documents(address: RemoteAddress, listed: Listed) -> list[str]:
    """Return the files of a source that are read; of one with a limit, the first ones."""
    assert address.source is not None
    files = [file for file in list_source(address.source, listed).files if file.kind not in UNREAD]
    if address.source.limit is not None:
        address.first = address.first or _files_within(files, address.source)
        files = files[: address.first]
    return [file.uri for file in files]


def _files_within(files: Sequence[File], source: Source) -> int:
    """Return about how many of `files` hold as much text as the limit of `source`."""
    assert source.limit is not None
    share = text_per_byte(source, files[0]) if files else 1.0
    sizes = accumulate(file.size * share for file in files)
    return next((count for count, size in enumerate(sizes, 1) if size >= source.limit), len(files))


def prepare_fetch(recipe: Recipe, root: Root, update: bool) -> tuple[Path, list[RemoteAddress]]:
    """Return the folder for copies, and the addresses of `recipe` with what is to be downloaded of each.

    Raises ValueError, one line per field at fault, and StoreError.
    """
    if faults := placeholders(recipe):
        raise ValueError("\n".join(faults))
    folder, addresses = copies_folder(root), remote_addresses(recipe)
    for uri in dict.fromkeys(address.uri for address in addresses):
        try:
            _prepare(folder, uri, addresses, update)
        except (ValueError, StoreError) as error:
            line = f"{next(address.field for address in addresses if address.uri == uri)}: {error}"
            if isinstance(error, StoreError):
                raise StoreError(line) from error
            faults.append(line)
    if faults:
        raise ValueError("\n".join(faults))
    return folder, addresses


def _prepare(folder: Path, uri: str, addresses: Sequence[RemoteAddress], update: bool) -> None:
    """Set the target of the fields that name `uri`: what any of them reads."""
    fields = [address for address in addresses if address.uri == uri]

    def choose(listed: Listed) -> set[str]:
        return {name for address in fields for name in address.choose(listed)}

    target = prepare(folder, uri, choose, update)
    for address in fields:
        address.target = target


def targets_of(addresses: Sequence[RemoteAddress]) -> list[Target]:
    """Return the targets of prepared addresses, each once."""
    return list({address.uri: address.target for address in addresses if address.target is not None}.values())


def fetch_files(
    recipe: Recipe, folder: Path, addresses: list[RemoteAddress], jobs: int, progress: Callable[[int, int], None]
) -> None:
    """Download the files of `addresses`; of a source with a limit, more files until its text reaches the limit.

    `progress` gets the bytes that came, and how many more are to come than it knew. Raises FetchRefused and OSError.
    """
    short = addresses
    while short:
        check_space(folder, targets_of(addresses))
        progress(0, missing_bytes(folder, targets_of(addresses)))
        download(folder, targets_of(addresses), jobs, lambda count: progress(count, 0))
        short = [address for address in addresses if _falls_short(address, recipe)]
        for address in short:
            address.first += 1 + address.first // 4
            _prepare(folder, address.uri, addresses, update=False)


def _falls_short(address: RemoteAddress, recipe: Recipe) -> bool:
    """Return whether a source with a limit needs more files than are fetched."""
    source = address.source
    if source is None or source.limit is None or address.domain is None or not address.first:
        return False
    files = [file for file in list_source(source).files if file.kind not in UNREAD]
    if address.first >= len(files):
        return False
    return not reaches_limit(source, address.domain, recipe.documents_seed, files[: address.first])


NEWER_COMMIT = "  [yellow]{} is now at {:.12}; the copy stays at {:.12} until herd fetch --update[/]"
OTHER_LICENSE = "  [yellow]the recipe says license {}, the Hub {}; correct one[/]"


@dataclass(frozen=True)
class FetchedField:
    """The files that one field of the recipe fetches."""

    address: RemoteAddress
    """The first of the field."""
    targets: list[Target]
    files: list[FetchedFile]
    listed: int
    """How many files the targets list; `files` are those selected."""
    missing_bytes: int

    @classmethod
    def of(cls, folder: Path, addresses: Sequence[RemoteAddress]) -> FetchedField:
        """Return the row of the addresses of one field; `folder` has the copies."""
        targets = targets_of(addresses)
        files = [file for target in targets for file in target.files if file.uri in set(target.selected)]
        listed = sum(len(target.files) for target in targets)
        return cls(addresses[0], targets, files, listed, missing_bytes(folder, targets))

    @property
    def stated_license(self) -> str:
        return self.address.source.license if self.address.source else "unknown"

    def facts(self) -> Iterator[str]:
        """Yield count, size, what is here, revision and license."""
        target, count, size = self.targets[0], len(self.files), sum(file.size for file in self.files)
        of = f" of {self.listed:,}" if count < self.listed else ""
        yield f"{count:,}{of} {'file' if count == self.listed == 1 else 'files'}"
        yield format_bytes(size)
        if here := size - self.missing_bytes:
            yield "here" if here == size else f"{format_bytes(here)} of them here"
        if target.commit:
            is_commit = target.revision and target.commit.startswith(target.revision)
            yield f"at {target.commit[:12]}" if is_commit else f"{target.revision or 'main'} at {target.commit[:12]}"
        if target.license or self.address.source:
            yield f"license {target.license or self.stated_license}"

    def sample(self) -> Iterator[str]:
        """Measure and yield the tokens of a source of text."""
        if self.address.source and self.address.domain and self.files:
            self.address.tokens = _text(self.address.source, self.files) * USUAL_TOKENS_PER_BYTE
            yield f"about {tokens(self.address.tokens)} tokens"

    def warnings(self) -> Iterator[str]:
        """Yield a line for each newer commit, and for each license that the recipe states otherwise."""
        stated = self.stated_license
        for target in self.targets:
            if target.newer_commit:
                yield NEWER_COMMIT.format(target.revision or "main", target.newer_commit, target.commit)
            if target.license not in ("", "other", stated) and stated != "unknown":
                yield OTHER_LICENSE.format(stated, target.license)


def fetch_lines(folder: Path, addresses: Sequence[RemoteAddress], sampled: bool = False) -> list[str]:
    """Return lines of markup for each field: files, size, revision, license; with `sampled` also its text in tokens."""
    lines = []
    for name, group in groupby(addresses, lambda address: address.field):
        field = FetchedField.of(folder, list(group))
        more = f" and {len(field.targets) - 1} more" if len(field.targets) > 1 else ""
        lines.append(f"{name}: {', '.join([*field.facts(), *(field.sample() if sampled else ())])}")
        lines.append(f"  [dim]{escape(field.targets[0].uri)}{more}[/]")
        lines += field.warnings()
    return lines


def epoch_lines(recipe: Recipe, addresses: Sequence[RemoteAddress]) -> list[str]:
    """Return a line of markup for each domain, or weighted or named source, whose sources `fetch_lines` sampled.

    It says how often the run reads it, before curation: what curation drops, more epochs replace.
    """
    amounts = {address.field: address.tokens for address in addresses if address.tokens}
    lines, limit = [], recipe.tokens.max_epochs
    for dataset in mix_datasets(recipe):
        sources, index = recipe.sources[dataset.domain], dataset.source_index
        pooled = [number for number, source in enumerate(sources) if not source.name]
        fields = [f"sources.{dataset.domain}.{number}" for number in (pooled if index is None else [index])]
        needed = float(tokens_needed(recipe, dataset.domain, dataset.source_name) * dataset.weight)
        if not all(field in amounts for field in fields) or not needed:
            continue
        once = sum(amounts[field] for field in fields)
        name, passes = f"sources.{dataset.domain}" if index is None else fields[0], needed / once
        epochs = f"{passes:.2g}" if passes < 100 else f"{passes:,.0f}"
        line = f"{name}: the run takes {tokens(needed)} of about {tokens(once)} tokens, {epochs} epochs"
        over = passes > limit
        remedy = f", more than tokens.max_epochs {limit:g} allows; add text, or lower its share"
        lines.append(f"[yellow]{line}{remedy}[/]" if over else line)
    return lines


def _text(source: Source, files: Sequence[FetchedFile]) -> float:
    """Return about how many bytes of text `files` hold, from a sample of the first one."""
    (sample,) = list_source(source.model_copy(update={"ignore": []}), [(files[0].uri, files[0].info)]).files
    text = sum(file.size for file in files) * text_per_byte(source, sample)
    return min(text, float(source.limit or text))


def copies_lines(recipe: Recipe) -> list[str]:
    """Return which addresses of `recipe` are read from fetched copies, as lines of the plan; none without any."""
    addresses = {address.uri: address.field for address in remote_addresses(recipe)}
    copies = {uri: listing for uri in addresses if (listing := fetched_listing(uri)) is not None}
    if not copies:
        return []
    remote = [field for uri, field in addresses.items() if uri not in copies]
    rest = f"; read remotely: {', '.join(remote)} (herd fetch downloads them)" if remote else ""
    commits = sorted({f"{listing.commit[:12]}" for listing in copies.values() if listing.commit})
    more = f" and {len(commits) - 3} more" if len(commits) > 3 else ""
    at = f" at {', '.join(commits[:3])}{more}" if commits else ""
    return [f"copies   {len(copies)} of {len(addresses)} remote addresses in {fetched_folder()}{at}{rest}"]
