"""What a run will do, before it does anything: the stage table, totals, FLOPs and warnings.

Everything is computed from the recipe alone; only the surveys of sources and evaluation data look at the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rich.table import Table

from llama3.data.readers.conversations import ConversationSurvey
from llama3.data.readers.sources import DomainSurvey
from llama3.evaluate.scores import check_evaluation
from llama3.model.flops import flops_per_token, parameter_count, vocab_rows
from llama3.parallel.layout import Layout
from llama3.parallel.memory import Load, memory, memory_line
from llama3.recipe.base import DOMAINS, Domain
from llama3.recipe.lint import lint, placeholders
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.recipe.units import Tokens, tokens
from llama3.tokens.tokenizer import Tokenizer
from storage.filesystem import is_local

MOST_TOKENS_PER_BYTE = 1 / 1.5
"""No tokenizer of ours made more tokens from a domain's text; a usual one makes 1 per 4 bytes of English."""
USUAL_TOKENS_PER_BYTE = 1 / 4
TOKENS_PER_MESSAGE = 5
"""Of the chat format around a content."""
SURELY = 3.0
"""Padding and estimates make fewer passes over conversations of what a survey counts, but not a third."""


@dataclass(frozen=True)
class RunPlan:
    recipe: Recipe
    schedule: Schedule
    rows: int
    """Embedding rows: base vocabulary and special tokens."""
    warnings: list[str]
    sources: list[DomainSurvey]
    conversations: Sequence[ConversationSurvey] = ()

    @property
    def parameters(self) -> int:
        return parameter_count(self.recipe.model, self.rows)

    def flops(self) -> tuple[float, float]:
        """Return the run's FLOPs as 6N per token, and with causal attention counted."""
        model, parts = self.recipe.model, [part for span in self.schedule.trained for part in span.segments]
        pairs = [(part.tokens, flops_per_token(model, self.rows, part.seq_len)) for part in parts]
        return sum(n * dense for n, (dense, _) in pairs), sum(n * causal for n, (_, causal) in pairs)


def make_plan(
    recipe: Recipe,
    sources: list[DomainSurvey],
    left_out: Sequence[str] = (),
    conversations: Sequence[ConversationSurvey] = (),
    tokenizer: Tokenizer | None = None,
) -> RunPlan:
    """Return the plan of `recipe`, given what surveys found in its sources and which tasks lack their data.

    `tokenizer` is the recipe's, if it is known already.
    """
    rows = tokenizer.rows if tokenizer else vocab_rows(recipe)
    short = [fault for found in sources if (fault := data_shortage(recipe, found, USUAL_TOKENS_PER_BYTE))]
    lacking = [f"evaluate: leaves out {line}" for line in left_out]
    warnings = [*placeholders(recipe), *lint(recipe), *short, *conversation_shortage(recipe, conversations), *lacking]
    return RunPlan(recipe, Schedule(recipe), rows, warnings, sources, conversations)


def survey_evaluation(recipe: Recipe) -> list[str]:
    """Return a line for each task that lacks its data on this machine; what is remote is looked at when a run begins.

    Raises ValueError as `check_evaluation`, which looks at the first rows of each file here.
    """
    return check_evaluation(recipe, look=is_local(recipe.evaluate.data or ""))


def survey_chats(recipe: Recipe, tokenizer: Tokenizer | None, remote: bool = True) -> list[ConversationSurvey]:
    """Return the amount of conversations of each source; their tokens with `tokenizer`. Raises SourceError."""
    from llama3.data.readers.conversations import survey_conversations
    from llama3.tokens.chat import encode_chat

    count = None if tokenizer is None else lambda messages: len(encode_chat(tokenizer, messages, False))
    return survey_conversations(recipe.conversations, recipe.documents_seed, remote, count)


def tokens_needed(recipe: Recipe, domain: Domain, name: str = "") -> int:
    """Return how many tokens the whole run trains on: of the source that stands apart as `name`, or of all others."""
    apart = recipe.named_sources

    def share(span: StageSpan) -> Fraction:
        added = {one: Fraction(of_one) for one, of_one in span.stage.extra_sources.items() if apart[one] == domain}
        return added.get(name, Fraction(0)) if name else span.shares.get(domain, Fraction(0)) - sum(added.values())

    return round(sum(span.tokens * share(span) for span in Schedule(recipe).spans))


def data_shortage(recipe: Recipe, found: DomainSurvey, tokens_per_byte: float) -> str:
    """Return what to do if the text found for a domain is too little under the epoch limit; "" if it is enough."""
    needed, once = tokens_needed(recipe, found.domain, found.name), found.bytes * tokens_per_byte
    if needed <= once * recipe.tokens.max_epochs or not found.complete:
        return ""
    return (
        f"sources.{found.title}: {found.bytes / 1e6:.2f} MB of text are about {tokens(once)} tokens; "
        f"the run takes {tokens(needed)}, more than tokens.max_epochs {recipe.tokens.max_epochs:g} allows; "
        f"add text, lower the share of {found.title}, or shorten the run"
    )


def conversation_shortage(
    recipe: Recipe, conversations: Sequence[ConversationSurvey], factor: float = 1.0
) -> list[str]:
    """Return a line for each stage of kind `sft` with more passes over its conversations than `factor` x the limit."""
    once, limit, lines = conversation_tokens(recipe, conversations), recipe.tokens.max_epochs, []
    for span in Schedule(recipe).spans:
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
        f"{model.kv_heads} KV, FFN {model.ffn}, vocabulary {plan.rows:,} rows",
        f"total    {tokens(plan.schedule.tokens)} tokens in {plan.schedule.steps:,} steps",
        f"FLOPs    {causal:.3g} (6N + causal attention); {dense:.3g} (6N, N without the embedding table)",
    ]
    if plan.recipe.init_from is not None:
        trained = plan.schedule.tokens - plan.schedule.trained[0].start
        lines.append(f"start    from {plan.recipe.init_from.path}; {tokens(trained)} tokens are trained here")
    for found in plan.sources:
        lines.append(f"source   {found.title}: {_found(found)}")
    for chats in plan.conversations:
        amount = f"{chats.conversations:,} in {chats.messages:,} messages, {chats.bytes / 1e6:.2f} MB"
        amount += f", about {tokens(_tokens_of(chats))} tokens" if chats.complete else ""
        lines.append(f"chats    {chats.name}: {amount if chats.complete else 'not looked at (remote)'}")
    if once := conversation_tokens(plan.recipe, plan.conversations):
        for span in (span for span in plan.schedule.spans if span.stage.kind == "sft"):
            replayed = f", replay {span.stage.replay} of {span.stage.mix}" if span.stage.replay else ""
            lines.append(f"epochs   {span.name}: about {(span.tokens - span.mix_tokens) / once:.2g}{replayed}")
    return lines


def _found(found: DomainSurvey) -> str:
    if not found.complete and not found.documents:
        return "not looked at (remote)"
    least = "" if found.complete else "at least "
    made = f", {found.generated / found.bytes:.0%} of it generated problems" if found.generated else ""
    unread = f"; cannot be read: {found.left_out}" if found.left_out else ""
    return f"{least}{found.bytes / 1e6:.1f} MB in {found.documents:,} documents{made}{unread}"


def memory_lines(plan: RunPlan, layout: Layout, processes: int, micro_batch: int) -> list[str]:
    """Return what the fullest process needs at each sequence length, with the largest batch of that length."""
    batches = {part.seq_len: part.batch for part in sorted(plan.schedule.segments, key=lambda part: part.batch)}
    lines = []
    for seq_len, batch in sorted(batches.items()):
        count = max(1, batch // (seq_len * layout.dp(processes) * micro_batch))
        load = Load(seq_len, micro_batch, count, plan.recipe.precision)
        needs = memory(plan.recipe.model, plan.rows, layout, processes, load)
        lines.append(f"memory   {memory_line(max(needs, key=lambda need: need.total))} (sequences of {seq_len:,})")
    return lines


def plan_markdown(plan: RunPlan) -> str:
    """Return the plan as markdown, for Prefect's page of the run."""
    head = "| stage | from | tokens | steps | seq_len | batch | lr | mix |\n|---|---|---|---|---|---|---|---|"
    rows = ["| " + " | ".join(row) + " |" for row in stage_rows(plan)]
    facts = [f"- {line}" for line in summary_lines(plan)]
    warnings = [f"- warning: {warning}" for warning in plan.warnings]
    return "\n".join([f"# Plan of {plan.recipe.name}", "", head, *rows, "", *facts, *warnings])
