"""Measure a run while it trains: tokens per second, share of the device's peak, memory per tier, seconds waited."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_zero.config.schema.own import OwnSettings
from hf_zero.core.holdings import taken
from hf_zero.core.schedule.torch_internals import in_backward
from hf_zero.observe import log_rank0, warn_once
from hf_zero.profiling.costs import ModelOperations
from hf_zero.profiling.waits import SlowRanks, WaitTimes
from hf_zero.system.sizes import gib

# 10^12 operations per second of dense bf16 matrix products with fp32 sums; vendors' numbers "with sparsity" are twice as high.
# One entry per name that torch gives a device.
PEAK_TFLOPS: tuple[tuple[str, float, str], ...] = (
    ("B200", 2250.0, "NVIDIA HGX B200 datasheet"),
    ("H200 NVL", 835.5, "NVIDIA H200 datasheet"),
    ("H200", 989.5, "NVIDIA H200 datasheet"),
    ("H100 NVL", 835.5, "NVIDIA H100 datasheet"),
    ("H100 PCIe", 756.5, "NVIDIA H100 datasheet"),
    ("H100", 989.5, "NVIDIA H100 datasheet"),
    ("A100", 312.0, "NVIDIA A100 datasheet"),
    ("A40", 149.7, "NVIDIA A40 datasheet"),
    ("A10", 125.0, "NVIDIA A10 datasheet"),
    ("L40S", 362.05, "NVIDIA L40S datasheet"),
    ("L40", 181.05, "NVIDIA L40 datasheet"),
    ("L4", 121.0, "NVIDIA L4 datasheet"),
    ("RTX 4090", 165.2, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    ("RTX 3090", 71.0, "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A"),
    ("MI325X", 1307.4, "AMD Instinct MI325X data sheet"),
    ("MI300X", 1307.4, "AMD Instinct MI300X data sheet"),
    ("MI250X", 191.5, "AMD Instinct MI200 data sheet; torch shows each of its two dies as a device"),
)
# Names that match the table but mean another device: smaller or larger versions, partitions, and names for two devices.
_OTHERS = re.compile(r"laptop|max-q|\bmig\b|4090 d\b|\bti\b|\bgrid\b|-\d+[abcq]\b|MI250X */ *MI250\b", re.IGNORECASE)


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a device in 10^12 dense bf16 operations per second, from ``PEAK_TFLOPS``; None if it is unknown.

    Args:
        device_name: Name from ``torch.cuda.get_device_name``, such as "NVIDIA H100 80GB HBM3".
    """
    if _OTHERS.search(device_name):
        return None
    for name, peak, _ in PEAK_TFLOPS:
        if re.search(rf"\b{re.escape(name)}\b", device_name, re.IGNORECASE):
            return peak
    return None


SPEED, MEMORY, WAITED = "Train/Speed/", "Train/Memory/", "Train/Waited/"
_NOTHING = nullcontext()


@dataclass
class Window:
    """Counts since the last record.

    Attributes:
        began: Time of the last record, in seconds of ``time.perf_counter``.
        steps: Number of optimizer steps.
        tokens: Number of elements of this rank's token ids.
        samples: Number of rows of this rank's batches.
        aside: Seconds of evaluations and saves, which belong to no step.
    """

    began: float
    steps: int = 0
    tokens: int = 0
    samples: int = 0
    aside: float = 0.0


@dataclass
class _Counted:
    """Operations of the counted step, with its tokens and samples, and whether the engine ran its backward."""

    operations: ModelOperations = field(default_factory=ModelOperations)
    tokens: int = 0
    samples: int = 0
    backward: bool = False


class StepMetrics:
    """Watcher that measures tokens and waits of every step, and returns a record every few steps.

    Operations are counted only in the first optimizer step, which is slower and part of no record. Later steps are assumed to need the same
    number per token (per sample, if a batch has no token ids). Recomputed operations do not count for utilisation.

    Args:
        module: The user's module.
        device: The training device.
        own: Settings ``step_metrics`` (optimizer steps between two records) and ``peak_tflops`` (without it the device is looked up).
        sharers: Number of ranks that compute on the same tokens (tensor parallelism).
        blocks_host: Whether a wait for a collective blocks the host.
        slow_ranks: Comparison of the waits of all ranks.
        on_disk: Function that returns the bytes of this rank's state in files.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        own: OwnSettings,
        sharers: int,
        blocks_host: bool,
        slow_ranks: SlowRanks,
        on_disk: Callable[[], int],
    ) -> None:
        self._slow_ranks = slow_ranks
        self._device, self._on_disk = device, on_disk
        self._every, self._sharers = own.step_metrics, sharers
        self._waits = WaitTimes(device, blocks_host)
        self._peak = own.peak_tflops or _known_peak(device)
        self._counting: _Counted | None = _Counted()
        self._counted: _Counted | None = None
        self._window = Window(time.perf_counter())
        self._step = 0  # number of the last optimizer step
        self._left: float | None = None  # end of the last backward or step; None before the first, and after a forward
        self._aside: float | None = None  # begin of the present evaluation or save
        self._handle = module.register_forward_pre_hook(self._see, with_kwargs=True)

    def remove(self) -> None:
        """Remove the hook from the module."""
        self._handle.remove()

    # -- called in training ---------------------------------------------------------------------------------------------

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count tokens and samples of a training forward."""
        if not torch.is_grad_enabled() or in_backward():
            return
        tokens, samples = batch_size(args, kwargs)
        self._window.tokens += tokens
        self._window.samples += samples
        if self._counting is not None:
            self._counting.tokens += tokens
            self._counting.samples += samples

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch one phase of the engine; the phase ``aside`` counts time that belongs to no step."""
        begin = time.perf_counter()
        if name == "aside" or (name == "forward" and not torch.is_grad_enabled()):
            if self._aside is None:
                self._aside = self._left if self._left is not None else begin
            yield
            return
        if self._aside is not None:
            self._window.aside += begin - self._aside
            self._aside = None
        elif name == "forward" and self._left is not None:
            self._waits.add("data", begin - self._left)
        with self._waits.counted(streams=(self._step + 1) % self._every == 0), self._count(name):
            yield
        self._left = time.perf_counter() if name != "forward" else None

    def _count(self, name: str) -> AbstractContextManager[Any]:
        counting = self._counting
        if counting is None or name == "step":
            return _NOTHING
        counting.backward |= name == "backward"
        return counting.operations

    # -- records --------------------------------------------------------------------------------------------------------

    def measure(self, step: int) -> dict[str, float]:
        """Return this rank's metrics since the last record; empty unless a record is due at ``step``, which makes the call collective."""
        window, self._step = self._window, step
        window.steps += 1
        if self._counting is not None:
            self._counted, self._counting = self._counting, None
            self._begin_window()
            return {}
        if step % self._every:
            return {}
        seconds = max(time.perf_counter() - window.began - window.aside, 1e-9)
        waits = self._waits.take(window.steps)
        found = {f"{SPEED}seconds_per_step": seconds / window.steps, **self._speed(window, seconds), **self._memory()}
        found |= {f"{WAITED}{kind}": waited for kind, waited in waits.items()}
        log_rank0("step=%d, rank 0: %s", step, line_of(found))
        found |= self._slow_ranks.measure(step, window.steps, seconds / window.steps, waits)
        self._begin_window()
        return found

    def _begin_window(self) -> None:
        self._waits.take(1)
        self._window = Window(time.perf_counter())

    def _speed(self, window: Window, seconds: float) -> dict[str, float]:
        found = {}
        if window.tokens:
            found["tokens_per_second_per_rank"] = window.tokens / seconds / self._sharers
        else:
            found["samples_per_second_per_rank"] = window.samples / seconds / self._sharers
        operations = self._operations_of(window)
        if operations is not None:
            found["tflops_per_rank"] = operations / seconds / 1e12
            if self._peak is not None:
                found["mfu"] = found["tflops_per_rank"] / self._peak
        return {f"{SPEED}{name}": value for name, value in found.items()}

    def _operations_of(self, window: Window) -> float | None:
        """Return the operations that the model needed; None if the counted step had no backward of the engine."""
        counted = self._counted
        if counted is None or not counted.backward or not counted.operations.needed:
            warn_once(
                "hf_zero.step_metrics: operations are not reported, because loss.backward() was called directly; call engine.backward(loss)"
            )
            return None
        if window.tokens and counted.tokens:
            return counted.operations.needed * window.tokens / counted.tokens
        return counted.operations.needed * window.samples / counted.samples if counted.samples else None

    def _memory(self) -> dict[str, float]:
        found = {"host": taken(torch.device("cpu")), "disk": self._on_disk()}
        if self._device.type != "cpu":
            most = torch.get_device_module(self._device).max_memory_allocated(self._device)
            found = {"device": taken(self._device), "device_peak": most, **found}
        return {f"{MEMORY}{tier}_bytes": float(nbytes) for tier, nbytes in found.items()}


def _known_peak(device: torch.device) -> float | None:
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    peak = peak_tflops(name)
    if peak is None:
        warn_once(
            f"hf_zero.step_metrics: utilisation is not reported, because the peak speed of {name!r} is not known: set hf_zero.peak_tflops"
        )
    return peak


def batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Return numbers of tokens (0 without token ids) and samples of one call of a model, including padding.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call; ``input_ids`` (samples, length) or ``inputs_embeds`` (samples, length, width) hold tokens.
    """
    ids = kwargs.get("input_ids")
    embedded = kwargs.get("inputs_embeds")
    given = [value for value in (ids, embedded, *args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.ndim]
    if not given:
        return 0, 0
    first = given[0]
    if first is embedded and first.ndim > 2:
        return first.shape[0] * first.shape[1], first.shape[0]
    holds_ids = not (first.is_floating_point() or first.is_complex() or first.dtype == torch.bool)
    return first.numel() if holds_ids else 0, first.shape[0] if first.ndim > 1 else 1


def line_of(found: Mapping[str, float]) -> str:
    """Return a record as one readable line."""
    speed, memory, waited = (
        {name.removeprefix(part): value for name, value in found.items() if name.startswith(part)} for part in (SPEED, MEMORY, WAITED)
    )
    seconds = speed["seconds_per_step"]
    parts = [f"{seconds:.4g} s per step"]
    rates = {name.partition("_")[0]: value for name, value in speed.items() if name.endswith("_per_second_per_rank")}
    parts += [f"{rate:.5g} {what}/s" for what, rate in rates.items()]
    if "tflops_per_rank" in speed:
        share = f" ({100 * speed['mfu']:.1f} % of the peak)" if "mfu" in speed else ""
        parts.append(f"{speed['tflops_per_rank']:.4g} TFLOPS{share}")
    parts += [f"{name.removesuffix('_bytes').replace('_', ' ')} {gib(nbytes)}" for name, nbytes in memory.items() if nbytes]
    stood = [f"{kind} {100 * value / seconds:.1f} %" for kind, value in waited.items() if value]
    return ", ".join([*parts, f"waited for {', '.join(stood)}" if stood else "waited for nothing"])
