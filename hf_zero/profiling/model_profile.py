"""Provide DeepSpeed's ``get_model_profile``, which profiles one forward of any model without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.profiling.costs import CostRecorder
from hf_zero.profiling.flops_profiler import FlopsProfiler

_MODES = ("forward", "generate")


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
    profiler.time_again(timed)
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    answers = (profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string))
    profiler.end_profile()
    return answers
