"""Rows of `python -m benchmarks train`: the training step beside three public models, and what surrounds it.

Steps are compared with torchtitan's model, transformers' LlamaForCausalLM and litgpt's GPT on the same weights, batch
and optimizer; every side's losses must agree, or the row fails. What this gives up: one thread and one process, so
nothing is said of communication; rows of the GPU are measured where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks import null_cuda, roofline, train_gpu, train_state
from benchmarks.measure import NotMeasured
from benchmarks.rows import TRAIN_TARGETS, Row, measured, rows_of
from benchmarks.train_rounds import Rounds
from benchmarks.train_session import PEERS, TrainSession

AGREE = {False: 1e-4, True: 0.02}
"""How far the sides' first losses may lie apart, in fp32 and with products in bf16."""


def step(run: TrainSession, name: str) -> Row:
    """CPU time of a step of the fastest peer over herd's."""
    model, number_format = name.split("/")[1].split("-")
    bf16 = number_format == "bf16"
    rounds = run.steps(model, bf16)
    found = [peer for peer in PEERS if peer in rounds.cpu_s]
    if not found:
        raise NotMeasured("; ".join(rounds.missing.values()))
    _check_losses(rounds, AGREE[bf16])
    ratios = {peer: rounds.ratio(peer, "ours") for peer in found}
    fastest = min(found, key=lambda peer: ratios[peer].value)  # by rounds and not by seconds, as the value is
    seconds = {side: round(rounds.seconds(side), 4) for side in rounds.cpu_s}
    others = ", ".join(f"{peer} {seconds[peer]:.3f} ({ratios[peer].value:.3f} x)" for peer in found)
    note = f"ours {seconds['ours']:.3f} s, {others}; noise +-{100 * ratios[fastest].noise:.1f} %"
    detail = {"seconds": seconds, "fastest": fastest, "missing": dict(rounds.missing)}
    every = {peer: [ratio.value, ratio.noise] for peer, ratio in ratios.items()}
    return measured(name, ratios[fastest].value, note, ratios=every, **detail)


def loss_memory(run: TrainSession, name: str) -> Row:
    """Memory that the plain loss takes over herd's, gradient of the weights included."""
    rounds = run.losses()
    plain, ours = (rounds.extra_bytes[side] / 1e6 for side in ("plain", "ours"))
    vocab_size, tokens, dim = run.size.vocabulary
    note = f"{plain:,.0f} MB against {ours:,.0f}; vocabulary {vocab_size:,}, {tokens:,} tokens, dim {dim}, fp32"
    return measured(name, plain / max(ours, 1e-3), note)


def loss_time(run: TrainSession, name: str) -> Row:
    """CPU time of herd's loss over the plain one."""
    rounds = run.losses()
    _check_losses(rounds, AGREE[False])
    ratio = rounds.ratio("ours", "plain")
    seconds = f"{rounds.seconds('ours'):.2f} s against {rounds.seconds('plain'):.2f}"
    return measured(name, ratio.value, f"{seconds}; noise +-{100 * ratio.noise:.1f} %")


MEASURES: dict[str, Callable[[TrainSession, str], Row]] = {
    **{name: step for name in TRAIN_TARGETS if name.startswith("step/")},
    "loss/memory": loss_memory,
    "loss/time": loss_time,
    **{name: train_state.checkpoint for name in TRAIN_TARGETS if name.startswith("checkpoint/")},
    **{name: train_state.restart for name in TRAIN_TARGETS if name.startswith("restart/")},
    "start/rank": train_state.rank_start,
    "loader/wait": train_state.loader,
    "held-out/time": train_state.held_out,
    **{name: train_state.layout for name in TRAIN_TARGETS if name.startswith("layout/")},
    **{name: null_cuda.null_row for name in TRAIN_TARGETS if name.startswith("null-cuda/")},
    **{name: roofline.roofline_row for name in TRAIN_TARGETS if name.startswith("roofline/")},
    **{name: train_gpu.gpu_row for name in TRAIN_TARGETS if name.startswith("gpu/")},
}


def train_rows(run: TrainSession) -> Iterator[Row]:
    """Yield the wanted rows as they are measured; what a missing library or an error prevents says so.

    Raises ValueError if the user asked for a row that there is not.
    """
    return rows_of(run, TRAIN_TARGETS, MEASURES)


def _check_losses(rounds: Rounds, apart: float, *sides: str) -> None:
    """Raise RuntimeError if the sides did not start from the same loss: then they are not the same step."""
    first = {side: rounds.losses[side][0] for side in sides or rounds.losses}
    if max(first.values()) - min(first.values()) > apart:
        raise RuntimeError(f"the sides disagree on the first loss: {first}")
