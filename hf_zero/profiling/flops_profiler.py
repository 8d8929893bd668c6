"""Provide DeepSpeed's ``FlopsProfiler`` and ``get_model_profile``, which count operations, time and parameters of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_zero.errors import ConfigError, StateError
from hf_zero.profiling.costs import CostRecorder, ModuleCost, count_params
from hf_zero.profiling.report import (
    aggregated_lines,
    duration_to_string,
    flops_text,
    flops_to_string,
    macs_to_string,
    params_to_string,
    rate_text,
    report_text,
    write_report,
)

_MODES = ("forward", "generate")


class FlopsProfiler:
    """Profiler of the operations, time and parameters of a model's forwards between ``start_profile`` and ``stop_profile``.

    Operations are those of ``torch.utils.flop_counter``: two per multiply-add (MAC) of matrix products, convolutions and attention.
    Element-wise operations do not count, so one MAC is exactly two operations.

    Attributes:
        model: The argument ``model``.
        ds_engine: The argument ``ds_engine``.
        recompute_fwd_factor: The argument ``recompute_fwd_factor``.
        started: Whether the profiler is recording.

    Args:
        model: The module to profile.
        ds_engine: The engine that trains it; the report contains its ranks and batch size.
        recompute_fwd_factor: Share of the forward that backward computes again, for the engine's report.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._recorder: CostRecorder | None = None

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Begin a new recording.

        Args:
            ignore_list: Classes of modules whose operations do not count.
        """
        if self.started:
            self.stop_profile()
        self._recorder = CostRecorder(self.model, tuple(ignore_list or ()))
        self.resume_profile()

    def resume_profile(self) -> None:
        """Continue after ``stop_profile``, and add to the recorded costs."""
        self._recorded().start()
        self.started = True

    def stop_profile(self) -> None:
        """End recording; the recorded costs are available until ``end_profile``."""
        if self.started:
            self._recorded().stop()
            self.started = False

    def reset_profile(self) -> None:
        """Delete the recorded costs; does nothing while recording."""
        if self._recorder is not None and not self.started:
            self._recorder = CostRecorder(self.model)

    def end_profile(self) -> None:
        """Stop recording, and delete the recorded costs."""
        self.stop_profile()
        self._recorder = None

    def replace_times(self, recorder: CostRecorder) -> None:
        """Replace the recorded times by the times of ``recorder``, which recorded the same calls without counting."""
        self._recorded().take_times(recorder)

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return the floating-point operations of the recorded forwards."""
        flops = self._recorded().total.flops
        return flops_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Return the multiply-adds of the recorded forwards."""
        macs = self._recorded().total.flops // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the number of parameters of the model before sharding."""
        params = count_params(self.model)
        return params_to_string(params) if as_string else params

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Return the seconds of the recorded forwards."""
        seconds = self._recorded().total.seconds
        return duration_to_string(seconds) if as_string else seconds

    flops = property(get_total_flops, doc="Result of ``get_total_flops()``.")
    macs = property(get_total_macs, doc="Result of ``get_total_macs()``.")
    params = property(get_total_params, doc="Result of ``get_total_params()``.")

    def tree(self) -> ModuleCost:
        """Return the recorded costs by module."""
        return self._recorded().tree()

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the profile, or write it to a file.

        Args:
            profile_step: Number of the profiled step, for the heading.
            module_depth: Depth down to which modules are listed; -1 lists all.
            top_modules: Number of classes of modules listed per depth.
            detailed: Whether to list every module.
            output_file: Path of the file to write; None prints.
        """
        total = self._recorded().total
        figures = [("parameters of the model", params_to_string(count_params(self.model)))]
        if self.ds_engine is not None:
            figures += [("data-parallel ranks", str(self.ds_engine.collectives.topology.replicas))]
            figures += [("samples per micro-step and rank", str(self.ds_engine.resolved.batch.micro))]
        figures += [
            ("forwards", str(total.calls)),
            ("forward operations", flops_text(total.flops)),
            ("forward time", duration_to_string(total.seconds)),
            ("forward operations per second", rate_text(total.flops, total.seconds)),
        ]
        title = f"hf_zero flops profiler, step {profile_step}"
        write_report(report_text(title, figures, self.tree(), module_depth, top_modules, detailed), output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the most expensive classes of modules of each depth."""
        print("\n".join(aggregated_lines(self.tree(), module_depth, top_modules)), flush=True)

    def _recorded(self) -> CostRecorder:
        if self._recorder is None:
            raise StateError("FlopsProfiler has recorded nothing; call start_profile() before the forward, and end_profile() last")
        return self._recorder


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Return floating-point operations, multiply-adds and number of parameters of one forward of ``model``.

    Runs the model ``warm_up`` times, once to count operations, and once to measure the time; without gradients, in ``eval`` mode.

    Args:
        model: The module to profile.
        input_shape: Shape of a tensor of ones, in the dtype of the model's parameters, that is the only argument.
        args: Positional arguments, if ``input_shape`` is None.
        kwargs: Keyword arguments.
        print_profile: Whether to print the report.
        detailed: Whether the report lists every module.
        module_depth: Depth down to which modules are listed; -1 lists all.
        top_modules: Number of classes of modules listed per depth.
        warm_up: Number of runs before the counted one.
        as_string: Whether to return texts with units instead of numbers.
        output_file: Path of a file for the report; None prints.
        ignore_modules: Classes of modules whose operations do not count.
        mode: "forward", or "generate" to call ``model.generate``.

    Raises:
        ConfigError: There are no arguments for the model, or ``mode`` is unknown.
    """
    if mode not in _MODES:
        raise ConfigError(f"get_model_profile(mode={mode!r}): {' or '.join(_MODES)} is allowed")
    if input_shape is not None:
        if not isinstance(input_shape, (tuple, list, torch.Size)) or not input_shape:
            raise ConfigError(f"get_model_profile(input_shape={input_shape!r}): a tuple of sizes, batch size first, is allowed")
        sample = next(model.parameters(), torch.empty(0))
        args = (torch.ones(tuple(input_shape), dtype=sample.dtype, device=sample.device),)
    if not args and not kwargs:
        raise ConfigError("get_model_profile() needs input_shape=, args= or kwargs= to call the model with")
    called: Any = model.generate if mode == "generate" else model
    run = partial(called, *args, **(kwargs or {}))
    profiler = FlopsProfiler(model)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                run()
            profiler.start_profile(ignore_list=ignore_modules)
            try:
                run()
            finally:
                profiler.stop_profile()
            timed = CostRecorder(model, counts=False)
            timed.start()
            try:
                run()
            finally:
                timed.stop()
    finally:
        for module, training in modes.items():
            module.training = training
    profiler.replace_times(timed)
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    answers = (profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string))
    profiler.end_profile()
    return answers
