"""``FlopsProfiler``: DeepSpeed's object for counting what a model computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_zero.errors import StateError
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


class FlopsProfiler:
    """Counts operations, time and parameters of ``model``'s forward between ``start_profile`` and ``stop_profile``.

    Operations are those of ``torch.utils.flop_counter``: two per multiplication with addition, of products of matrices, convolutions and
    attention. Element-wise operations are left out, so a multiplication with addition (MAC) is exactly two of them.

    Args:
        model: The module.
        ds_engine: The engine that trains it; its ranks and batch size stand in the report.
        recompute_fwd_factor: Part of forward that backward computes again, as it is to be told apart in an engine's report.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._recorder: CostRecorder | None = None

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Begins to record, from nothing.

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
        """Forgets what was recorded."""
        if self._recorder is not None and not self.started:
            self._recorder = CostRecorder(self.model)

    def end_profile(self) -> None:
        """Ends recording and forgets everything."""
        self.stop_profile()
        self._recorder = None

    def time_again(self, recorder: CostRecorder) -> None:
        """Takes times from ``recorder``, which saw the same calls and counted nothing."""
        self._recorded().take_times(recorder)

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return floating-point operations of the recorded forwards."""
        flops = self._recorded().total.flops
        return flops_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Return multiplications with addition of the recorded forwards."""
        macs = self._recorded().total.flops // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the number of parameters of the model, sharded ones whole."""
        params = count_params(self.model)
        return params_to_string(params) if as_string else params

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Return seconds of the recorded forwards."""
        seconds = self._recorded().total.seconds
        return duration_to_string(seconds) if as_string else seconds

    flops = property(get_total_flops, doc="As ``get_total_flops``.")
    macs = property(get_total_macs, doc="As ``get_total_macs``.")
    params = property(get_total_params, doc="As ``get_total_params``.")

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
        """Prints the profile, or writes it to a file.

        Args:
            profile_step: Step that was profiled, for the heading.
            module_depth: Deepest modules listed; -1 is all.
            top_modules: Classes of modules listed per depth.
            detailed: List every module.
            output_file: File to write to.
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
        """Prints the costliest classes of modules of each depth."""
        print("\n".join(aggregated_lines(self.tree(), module_depth, top_modules)), flush=True)

    def _recorded(self) -> CostRecorder:
        if self._recorder is None:
            raise StateError("FlopsProfiler has recorded nothing; call start_profile() before the forward, and end_profile() last")
        return self._recorder
