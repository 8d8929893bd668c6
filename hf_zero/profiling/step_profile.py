"""Profile one optimizer step: count its operations, measure its phases, and print a report at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from hf_zero.config.schema import monitoring
from hf_zero.core.step.progress import Clock
from hf_zero.observe import global_rank, warn_once
from hf_zero.profiling.costs import OperationCounter, count_params
from hf_zero.profiling.flops_profiler import FlopsProfiler
from hf_zero.profiling.report import duration_to_string, flops_text, params_to_string, rate_text, report_text, write_report


class StepCount(Protocol):
    """Object with the number of finished optimizer steps."""

    global_steps: int


@dataclass
class StepProfile:
    """Profile of one optimizer step of one rank: seconds by phase, operations of backward, number of micro-steps."""

    seconds: dict[str, float] = field(default_factory=dict)
    backward: OperationCounter = field(default_factory=OperationCounter)
    micro_steps: int = 0


class ProfilingClock(Clock):
    """Clock that profiles one optimizer step of ``module`` on rank 0.

    Attributes:
        profiler: Profiler of the forwards; keeps the last profile after the step.
        profile: Times and operations of the profiled step; None outside of it.
    """

    def __init__(
        self, device: torch.device, memory: bool, section: monitoring.FlopsProfiler, module: nn.Module, count: StepCount, ranks: int
    ) -> None:
        super().__init__(device, breakdown=True, memory=memory)
        self.profiler = FlopsProfiler(module, recompute_fwd_factor=section.recompute_fwd_factor)
        self.profile: StepProfile | None = None
        self._section = section
        self._count = count
        self._ranks = ranks
        self._device_type = device.type

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of one phase, and in the profiled step count its operations."""
        with super().phase(name):
            if self._count.global_steps != self._section.profile_step or global_rank() != 0 or not self._trains(name):
                yield
                return
            start = self.now()
            with self._counting(name) as profile:
                yield
            profile.seconds[name] = profile.seconds.get(name, 0.0) + self.now() - start

    def _trains(self, name: str) -> bool:
        """Return whether the phase ``name`` belongs to a training step; forwards without gradients, of evaluations, do not.

        The mode of the model tells nothing: a model of ``from_pretrained`` is in eval mode, and trains so if no one calls ``train()``.
        """
        return name != "forward" or torch.is_grad_enabled()

    @contextmanager
    def _counting(self, name: str) -> Iterator[StepProfile]:
        profile = self.profile = self.profile or StepProfile()
        if name == "forward":
            profile.micro_steps += 1
            if profile.micro_steps == 1:
                self.profiler.start_profile()
            else:
                self.profiler.resume_profile()
            try:
                yield profile
            finally:
                self.profiler.stop_profile()
        elif name == "backward":
            with profile.backward:
                yield profile
        else:
            yield profile

    def end_step(self, step: int, samples: int, offloaded: Mapping[str, int]) -> None:
        """Print the times of the phases, and the report if the step was profiled; warn if the engine ran no forward in it."""
        super().end_step(step, samples, offloaded)
        profile, self.profile = self.profile, None
        if profile is None:
            return
        if not profile.micro_steps:
            warn_once(
                f"flops_profiler has no report: optimizer step {self._section.profile_step} (counted from 0) had no forward of the engine "
                "with gradients. Forwards are counted if the script calls the engine, not the module in it, with gradients enabled"
            )
            return
        section = self._section
        title = f"hf_zero flops profiler, optimizer step {self._section.profile_step} (counted from 0), rank 0 of {self._ranks}"
        figures, tree = self._figures(profile, samples), self.profiler.tree()
        write_report(report_text(title, figures, tree, section.module_depth, section.top_modules, section.detailed), section.output_file)

    def _figures(self, profile: StepProfile, samples: int) -> list[tuple[str, str]]:
        forward, backward = int(self.profiler.get_total_flops()), profile.backward.total
        seconds = [profile.seconds.get(name, 0.0) for name in ("forward", "backward", "step")]
        whole = sum(seconds)
        figures = [
            ("data-parallel ranks", str(self._ranks)),
            ("samples of all ranks in the step", str(samples)),
            ("micro-steps", str(profile.micro_steps)),
            ("parameters of the model", params_to_string(count_params(self.profiler.model))),
            ("forward operations per rank", flops_text(forward)),
            ("backward operations per rank", flops_text(backward)),
        ]
        recomputed = self._section.recompute_fwd_factor * forward
        if recomputed:
            figures.append(("of these recomputed (recompute_fwd_factor)", flops_text(recomputed)))
        figures += [
            ("forward time", duration_to_string(seconds[0])),
            ("backward time, reductions included", duration_to_string(seconds[1])),
            ("step time", duration_to_string(seconds[2])),
            ("forward operations per second", rate_text(forward, seconds[0])),
            ("backward operations per second", rate_text(backward, seconds[1])),
            ("forward and backward operations per second", rate_text(forward + backward, seconds[0] + seconds[1])),
            ("operations per second of the whole step", rate_text(forward + backward, whole)),
        ]
        if recomputed:
            figures.append(("the same without recomputation", rate_text(forward + backward - recomputed, whole)))
        return [*figures, ("samples of all ranks per second", f"{samples / whole:.4g}")]
