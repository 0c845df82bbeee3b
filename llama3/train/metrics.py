"""The names of all training metrics. The step of every point is the position in tokens.

Lower case; `/` separates sections; the name ends with the unit. Functions return the keys of a domain or source.
"""

from __future__ import annotations

from collections.abc import Sequence, ValuesView
from itertools import islice
from statistics import fmean

LOSS = "train/loss"  # Nats per target token, over the whole batch
GRAD_NORM = "train/grad_norm"  # Before clipping
LEARNING_RATE = "train/lr"
BATCH_TOKENS = "train/batch_tokens"
SEQ_LEN = "train/seq_len"
TARGET_TOKENS = "train/target_tokens"  # Tokens of the batch that the loss is averaged over, in a stage of kind `sft`
STEP = "train/step"  # Optimizer steps since the start of the run, those that were skipped included
SKIPPED = "train/skipped_steps"
"""1 if the batch changed nothing: it was bad, or skipped after a rollback; absent otherwise."""
SKIPPED_TOKENS = "train/skipped_tokens"  # Tokens of the stage so far whose batch changed nothing; written when it grows
SPIKE_SCORE = "train/spike_zscore"
"""Distance of the loss, or of the logarithm of the gradient norm if larger, above its mean over the last good steps, in
spreads."""

TOKENS_PER_S = "throughput/tokens_per_s"
TOKENS_PER_S_PER_DEVICE = "throughput/tokens_per_s_per_device"  # Averaged over all devices of the layout
TFLOPS_PER_DEVICE = "throughput/tflops_per_device"  # 6N and causal attention, without recomputed operations
MFU = "throughput/mfu"  # The same as a fraction of the device's dense peak; absent if the peak is unknown
MFU_FULL = "throughput/mfu_full_attention"  # 6N and full attention, over the same peak: the figure that others publish

STEP_S = "time/step_s"  # One optimizer step, including the wait for data, without saving
DATA_WAIT_S = "time/data_wait_s"
CHECKPOINT_S = "time/checkpoint_s"  # Time that training stopped for the checkpoint begun since the previous record
CHECKPOINT_WRITE_S = "time/checkpoint_write_s"
"""From the beginning to the commit of a checkpoint finished since the previous record."""
FIRST_STEP_S = "time/first_step_s"  # From the start of an attempt's processes to the end of its first step
GOODPUT = "time/goodput"  # Fraction of the time since the first start of the stage that was spent on steps that count
EFFECTIVE_TIME = "time/effective_time"  # The same over the time of a fault test, from its first step on
PLANNED_EFFECTIVE_TIME = "plan/effective_time"
"""The prediction of the planner's simulation for it, from times measured before."""
PLANNED_EFFECTIVE_TIME_CLOSED = "plan/effective_time_closed_form"
"""The prediction of the closed formula, which knows only the failure rate; absent outside its range."""
SLOWEST_RANK_S = "time/slowest_rank_s"
"""Own work in one step of the process that is slowest relative to its peers (see `stragglers`)."""
MEDIAN_RANK_S = "time/median_rank_s"  # Median of its peers
REMAINING_S = "time/remaining_s"  # Until the end of the stage, at the rate of the last steps

HOST_GIB = "memory/host_gib"  # Peak resident memory of the first process so far
DEVICE_GIB = "memory/device_gib"  # Device memory of the tensors of the first process
DEVICE_PEAK_GIB = "memory/device_peak_gib"  # Its peak so far
DEVICE_RESERVED_GIB = "memory/device_reserved_gib"
"""Peak memory that torch reserved on the device so far: this must fit."""

HELD_OUT = "val/bpb"
"""Bits per byte of a few held-out documents, scored by the trainer; the domains averaged by the first stage's mix."""
HELD_OUT_S = "time/val_s"  # Time that training stopped for the scoring

PLANNED_STEP_S = "plan/step_s"
"""Step time predicted by the planner; absent if the device was not measured (`herd plan calibrate`)."""
PLANNED_TFLOPS = "plan/tflops_per_device"  # The same as a rate, counted as `throughput/tflops_per_device`
PLANNED_GIB = "plan/device_gib"
"""Predicted memory of the fullest process: weights, optimizer, gradients and activations."""
STEP_ERROR = "plan/step_error"  # Predicted over measured step time, minus 1
GPU_HOURS = "cost/gpu_hours"
"""Device-hours of all training up to here, of earlier stages and failed attempts too; a process is a device."""
USD = "cost/usd"  # The same times the price of a GPU-hour; absent on processors without a price
KWH = "cost/kwh"  # The same times the assumed power of a GPU; absent if no power is known

RESTARTS = "recovery/restarts"
ROLLBACKS = "recovery/rollbacks"  # Number of rollbacks of the stage to before a spike
LOST_TOKENS = "recovery/lost_tokens"  # Tokens that had to be trained again
REPLAY_MAX_ABS_DIFF = "recovery/replay_max_abs_diff"
"""Largest difference of loss or gradient norm between a replayed step and its first run; 0 is bit for bit."""

# Health of the nodes (`herd.llama3.train.health`), over all of an attempt's nodes and the time since the last point
GPU_UTILIZATION = "system/gpu_utilization"  # Fraction of the time in which a kernel ran; mean of the GPUs
GPU_TEMPERATURE = "system/gpu_temperature_c"  # The hottest GPU
GPU_POWER = "system/gpu_power_w"  # Mean of the GPUs
GPU_CLOCK = "system/gpu_sm_clock_mhz"  # The slowest GPU
GPU_THROTTLED = "system/gpu_throttled"  # GPUs that the hardware slows down because of heat or power
GPU_ECC = "system/gpu_ecc_uncorrected"  # Uncorrectable memory errors since the driver was loaded
GPU_ECC_LIFETIME = "system/gpu_ecc_uncorrected_lifetime"
GPU_REMAPPED = "system/gpu_remapped_rows"  # Memory rows replaced because of uncorrectable errors
GPU_XIDS = "system/gpu_xid_errors"  # Critical Xid events since the start of the attempt
GPU_PCIE_LANES = "system/gpu_pcie_lanes"  # The narrowest link
GPU_PCIE_GENERATION = "system/gpu_pcie_generation"  # The slowest link; an idle GPU lowers it
CPU_LOAD = "system/cpu_load"  # Threads that run or want to, over the processors; the busiest node
MEMORY_PRESSURE = "system/memory_pressure"  # Fraction of 10 s in which a process waited for memory; the worst node
IO_PRESSURE = "system/io_pressure"  # The same for disks
MEMORY_ERRORS = "system/memory_ecc_uncorrected"  # Errors of the host's memory since the start of the attempt
DISK_ERRORS = "system/disk_errors"  # The same of disks
NETWORK_ERRORS = "system/network_errors"  # The same of network cards and InfiniBand ports
PREFLIGHT_TFLOPS = "system/preflight_tflops"  # Matrix product before the first step; the slowest node
PREFLIGHT_ALL_REDUCE = "system/preflight_all_reduce_gb_s"  # All-reduce inside a node; the slowest
PREFLIGHT_DISK = "system/preflight_disk_mb_s"  # Write into the stage's folder; the slowest node
CLOCK_OFFSET = "system/clock_offset_s"  # Clock of the file system less that of the node; the largest

STUDY_RUNS = "study/runs"  # Runs that the verdict of a study is based on
STUDY_FLOPS = "study/flops"  # Training FLOP of its runs; shared stages count once
STUDY_GPU_HOURS = "cost/gpu_hours"  # Device-hours of training of its runs; shared stages count once


def study_gain(variant: str, score: str) -> str:
    """Improvement of a variant of a study over the control on a score."""
    return f"study/gain/{variant}/{score.removeprefix('eval/')}"


def cost(name: str) -> str:
    """One of `gpu_hours`, `usd` and `kwh`, of all training so far."""
    return f"cost/{name}"


def stage_cost(name: str) -> str:
    """A stage's own part of `cost/<name>`."""
    return f"cost/stage_{name}"


def domain_loss(domain: str) -> str:
    """Nats per target token of one domain."""
    return f"train/loss/{domain}"


def held_out(domain: str) -> str:
    """Bits per byte of held-out documents of one domain."""
    return f"{HELD_OUT}/{domain}"


def fraction(domain: str) -> str:
    """Share of a domain, or of its source in `domain/source`, in the tokens of the stage so far."""
    return f"data/fraction/{domain}"


def target_fraction(domain: str) -> str:
    """That share as planned by the recipe."""
    return f"data/target_fraction/{domain}"


def epochs(dataset: str) -> str:
    """Number of passes over the domain (or over one weighted source of it)."""
    return f"data/epochs/{dataset}"


def window(steps: int) -> int:
    """Return over how many steps at either end of `steps` the loss is averaged: a tenth, at least 16, at most half."""
    return max(1, min(steps // 2, max(16, steps // 10)))


def mean_loss(losses: Sequence[float] | ValuesView[float]) -> float:
    """Return the mean loss of a stage, as it is shown everywhere: of its last tenth of `losses`, one for each step."""
    newest = reversed(losses)  # type: ignore[arg-type]  # a dict has reversed values, which typeshed does not say
    return fmean(islice(newest, window(len(losses))))
