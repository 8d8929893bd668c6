"""Sections that measure or tune a run: timers, profilers, the autotuner, the collective recorder."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from hf_zero.config.schema.fields import Bool, Int, NonNegative, Section, Size, later, part, refused, section


class Throughput(Section):
    """`timers.throughput`. Throughput timer."""

    enabled: Bool = part(True, "Measure samples per second")
    synchronized: Bool = part(True, "Synchronise the device around measurements")


class Timers(Section):
    """`timers`. Timer section."""

    throughput: Throughput = section(Throughput, "Throughput timer")


class ModelInfo(Section):
    """`autotuning.model_info`. Model facts."""

    profile: Bool = part(False, "Collect the facts by profiling")
    num_params: Int | None = part(None, "Parameter count")
    hidden_size: Int | None = part(None, "Hidden size")
    num_layers: Int | None = part(None, "Layer count")


class Autotuning(Section):
    """`autotuning`. Search for stage, micro batch and related settings from the launcher."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Bool = refused(False, "Run the tuner from the launcher", "not supported: remove the section and set the batch size yourself")
    fast: Bool = part(True, "Tune only stage and micro batch")
    results_dir: str = part("autotuning_results", "Folder of results")
    exps_dir: str = part("autotuning_exps", "Folder of experiment descriptions")
    overwrite: Bool = part(True, "Repeat finished experiments")
    start_profile_step: Int = part(3, "First profiled step")
    end_profile_step: Int = part(5, "Last profiled step")
    metric: str = part("throughput", "latency throughput or flops")
    metric_path: str | None = part(None, "File that receives the metric")
    tuner_type: str = part("gridsearch", "gridsearch random or model_based")
    tuner_early_stopping: Int = part(5, "Experiments without gain before stopping")
    tuner_num_trials: Int = part(50, "Most experiments per space")
    arg_mappings: dict[str, Any] | None = part(None, "Map from configuration keys to script arguments")
    max_train_batch_size: Int | None = part(None, "Upper bound of the global batch")
    min_train_batch_size: Int = part(1, "Lower bound of the global batch")
    max_train_micro_batch_size_per_gpu: Int = part(1024, "Upper bound of the micro batch")
    min_train_micro_batch_size_per_gpu: Int = part(1, "Lower bound of the micro batch")
    num_tuning_micro_batch_sizes: Int = part(3, "Micro batch sizes tried")
    mp_size: Int = part(1, "Model parallel degree")
    model_info_path: str | None = part(None, "File with model facts")
    model_info: ModelInfo | None = section(None, "Model facts")


class FlopsProfiler(Section):
    """`flops_profiler`. Count operations and time of one training step."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Bool = later(
        False, "Count operations and time of one training step on rank 0; wall_clock_breakdown goes on too", "flops_profiler"
    )
    recompute_fwd_factor: NonNegative = part(
        0.0, "Part of forward that activation checkpointing computes again (1 for all): the report tells it apart from what was counted"
    )
    profile_step: Size = part(1, "Optimizer steps before the one that is profiled; 0 profiles the first, without warm-up")
    module_depth: Annotated[Int, Field(ge=-1)] = part(-1, "Depth of the modules in the report; -1 is all")
    top_modules: Size = part(1, "Classes of modules listed per depth, those with the most parameters, operations and time")
    detailed: Bool = part(True, "Print a line for every module")
    output_file: str | None = part(None, "File that the report is written to; null prints it")


class CommsLogger(Section):
    """`comms_logger`. Recorder of collectives."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Bool = later(
        False, "Count the engine's collectives, their bytes, latency and bandwidth for deepspeed.comm.log_summary()", "comms_logger"
    )
    prof_all: Bool = part(True, "Record every operation; false records those of prof_ops")
    prof_ops: list[str] = part(list, "Names of the operations to record where prof_all is false: all_reduce, all_gather, ...")
    verbose: Bool = part(False, "Log each operation on rank 0")
    debug: Bool = part(False, "Tell operations apart by the unit they carry and the phase that asked for them")
