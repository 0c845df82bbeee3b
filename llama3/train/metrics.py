"""The names of all training metrics, in one place. The step of every point is the position in tokens.

Lower case, `/` cuts sections, the unit stands in the name. Functions make the keys that go by a domain or leaf.
"""

from __future__ import annotations

LOSS = "train/loss"
"""Nats per target token, over the whole batch."""
GRAD_NORM = "train/grad_norm"
"""Before clipping."""
LEARNING_RATE = "train/lr"
BATCH_TOKENS = "train/batch_tokens"
SEQ_LEN = "train/seq_len"
STEP = "train/step"
"""Optimizer steps since the start of the run, those that were skipped included."""
SKIPPED = "train/skipped"
"""1 where the batch changed nothing: found bad, or passed over after a rollback; absent elsewhere."""
SKIPPED_TOKENS = "skip/tokens"
"""Tokens of the stage whose batch changed nothing, so far; written where that grows."""
SPIKE_SCORE = "spike/score"
"""How far the loss, or the logarithm of the gradient norm if that is more, lies above its mean over the window before,
in multiples of the spread there."""

TOKENS_PER_S = "throughput/tokens_per_s"
TOKENS_PER_S_PER_DEVICE = "throughput/tokens_per_s_per_device"
"""Over all devices of the layout, whatever they share."""
TFLOPS_PER_DEVICE = "throughput/tflops_per_device"
"""6 N and causal attention, without recomputed work."""
MFU = "throughput/mfu"
"""The same over the device's dense peak; absent where the peak is not known."""
MFU_FULL = "throughput/mfu_full_attention"
"""6 N and attention over all scores, over the same peak: the figure that others publish."""

STEP_S = "time/step_s"
"""One optimizer step, waiting for data included, saving not."""
DATA_WAIT_S = "time/data_wait_s"
CHECKPOINT_S = "time/checkpoint_s"
"""Time that training stood still for the checkpoint begun since the record before."""
CHECKPOINT_WRITE_S = "time/checkpoint_write_s"
"""From the beginning to the commit of a checkpoint that was finished since the record before."""
FIRST_STEP_S = "time/first_step_s"
"""From the start of an attempt's processes to the end of its first step."""
GOODPUT = "time/goodput"
"""Share of the time since the stage was first started that went into steps that count."""
EFFECTIVE_TIME = "time/effective_time"
"""The same over the span of a replay of failures, from its first step on."""
PLANNED_EFFECTIVE_TIME = "plan/effective_time"
"""What the planner's simulation says of that span, from times measured before it."""
PLANNED_EFFECTIVE_TIME_CLOSED = "plan/effective_time_closed_form"
"""What its formula says, which knows only how often failures come; absent outside its range."""
SLOWEST_RANK_S = "time/slowest_rank_s"
"""Own work in one step of the process that is slowest against its peers (see `stragglers`)."""
MEDIAN_RANK_S = "time/median_rank_s"
"""Median of its peers."""
REMAINING_S = "time/remaining_s"
"""Until the end of the stage, at the rate of the last steps."""

HOST_GIB = "memory/host_gib"
"""Largest resident memory of the first process so far."""
DEVICE_GIB = "memory/device_gib"
"""Device memory that tensors of the first process hold now."""
DEVICE_PEAK_GIB = "memory/device_peak_gib"
"""The most that they held so far."""
DEVICE_RESERVED_GIB = "memory/device_reserved_gib"
"""The most that torch took from the device so far: what must fit."""

HELD_OUT = "held_out/bpb"
"""Bits per byte of a few held-out documents, scored by the trainer; the domains averaged by the first stage's mix."""
HELD_OUT_S = "time/held_out_s"
"""Time that training stood still for it."""

PLANNED_STEP_S = "plan/step_s"
"""What the planner said a step would take; absent where nobody measured the device (`herd plan calibrate`)."""
PLANNED_TFLOPS = "plan/tflops_per_device"
"""The same as a rate; as `throughput/tflops_per_device` counts it."""
PLANNED_GIB = "plan/device_gib"
"""What the planner said that the fullest process needs: weights, optimizer, gradients and activations."""
STEP_ERROR = "plan/step_error"
"""Planned over measured time of a step, less 1."""
GPU_HOURS = "cost/gpu_h"
"""Device-hours so far, interruptions included."""

RESTARTS = "recovery/restarts"
ROLLBACKS = "recovery/rollbacks"
"""Times that the stage went back to before a spike."""
LOST_TOKENS = "recovery/lost_tokens"
"""Tokens that had to be trained again."""
REPLAY_MAX_ABS_DIFF = "recovery/replay_max_abs_diff"
"""Largest difference of loss or gradient norm between a replayed step and its first run; 0 is bit for bit."""

STUDY_RUNS = "study/runs"
"""Runs that a study's verdict rests on."""
STUDY_FLOPS = "study/flops"
"""Training operations of its runs, shared stages counted in each."""
STUDY_DEVICE_H = "study/device_h"
"""Device-hours that the training of its runs took, shared stages once."""


def study_gain(arm: str, score: str) -> str:
    """How much better an arm of a study is than the control on a score."""
    return f"study/gain/{arm}/{score.removeprefix('eval/')}"


def domain_loss(domain: str) -> str:
    """Nats per target token of one domain."""
    return f"loss/{domain}"


def held_out(domain: str) -> str:
    """Bits per byte of held-out documents of one domain."""
    return f"{HELD_OUT}/{domain}"


def share(domain: str) -> str:
    """Share of the stage's tokens so far that are of the domain, or of its source in `domain/source`."""
    return f"data/share/{domain}"


def planned_share(domain: str) -> str:
    """What the recipe asks that share to be."""
    return f"data/planned_share/{domain}"


def epochs(leaf: str) -> str:
    """How often the domain (or the weighted source of one) has been read through."""
    return f"data/epochs/{leaf}"


def window(steps: int) -> int:
    """Return over how many steps the loss at either end of `steps` is the mean: a tenth of them, at least 16."""
    return max(16, steps // 10)
