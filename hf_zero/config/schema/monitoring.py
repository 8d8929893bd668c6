"""Sections that watch a run: monitors that records are written to, timers, profilers, the autotuner, the recorder of collectives."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hf_zero.config.schema.fields import ANY_CASE, Bool, Count, Int, NonNegative, Section, Size, accepted, part, section, used


class Tensorboard(Section, switch="enabled"):
    """`tensorboard`. TensorBoard monitor."""

    enabled: Bool = used(False, "Write TensorBoard events")
    output_path: str = used("", "Folder of the events")
    job_name: str = used("DeepSpeedJobName", "Sub-folder name")


class Wandb(Section, switch="enabled"):
    """`wandb`. Weights & Biases monitor."""

    enabled: Bool = used(False, "Log to Weights & Biases")
    group: str | None = used(None, "Run group")
    team: str | None = used(None, "Team")
    project: str = used("deepspeed", "Project")


class Comet(Section, switch="enabled"):
    """`comet`. Comet monitor."""

    enabled: Bool = used(False, "Log to Comet")
    samples_log_interval: Count = used(100, "Samples between submissions")
    project: str | None = used(None, "Project")
    workspace: str | None = used(None, "Workspace")
    api_key: str | None = used(None, "Key; shown as *** wherever the configuration is printed", secret=True)
    experiment_name: str | None = used(None, "Experiment name")
    experiment_key: str | None = used(None, "Experiment key")
    online: Bool | None = used(None, "Online or offline experiment")
    mode: Annotated[Literal["get", "create", "get_or_create"], ANY_CASE] | None = used(None, "get create or get_or_create")


class CsvMonitor(Section, switch="enabled"):
    """`csv_monitor`. csv monitor."""

    enabled: Bool = used(False, "Write csv files")
    output_path: str = used("", "Folder of the files")
    job_name: str = used("DeepSpeedJobName", "Sub-folder name")


class Trackio(Section, switch="enabled"):
    """`trackio`. Trackio monitor."""

    enabled: Bool = used(False, "Log to Trackio")
    project: str = used("deepspeed", "Project")


class Throughput(Section):
    """`timers.throughput`. Throughput timer."""

    enabled: Bool = part(True, "Measure samples per second")
    synchronized: Bool = part(True, "Synchronise the device around measurements")


class Timers(Section):
    """`timers`. Timer section."""

    throughput: Throughput = section(Throughput, "Throughput timer")


class FlopsProfiler(Section, switch="enabled"):
    """`flops_profiler`. Count operations and time of one training step."""

    enabled: Bool = used(False, "Count operations and time of one training step on rank 0; this also enables wall_clock_breakdown")
    recompute_fwd_factor: NonNegative = part(
        0.0, "Fraction of forward that activation checkpointing recomputes (1 for all); the report lists recomputation separately"
    )
    profile_step: Annotated[Int, Field(ge=-1)] = part(
        1, "Optimizer steps before the one that is profiled; 0 profiles the first, without warm-up; -1 profiles none"
    )
    module_depth: Annotated[Int, Field(ge=-1)] = part(-1, "Depth of the modules in the report; -1 is all")
    top_modules: Size = part(1, "Number of module classes listed per depth: those with the most parameters, operations and time")
    detailed: Bool = part(True, "Print a line for every module")
    output_file: str | None = part(None, "File that the report is written to; null prints it")
    step: Size = accepted(1, "Written by some configurations instead of profile_step", "DeepSpeed does not read it; write profile_step")


class CommsLogger(Section, switch="enabled"):
    """`comms_logger`. Recorder of collectives."""

    enabled: Bool = used(False, "Count the engine's collectives, their bytes, latency and bandwidth for deepspeed.comm.log_summary()")
    prof_all: Bool = part(True, "Record every operation; false records those of prof_ops")
    prof_ops: list[str] = part(list, "Names of the operations to record if prof_all is false: all_reduce, all_gather, ...")
    verbose: Bool = part(False, "Log each operation on rank 0")
    debug: Bool = part(False, "Distinguish operations by the unit they send and the phase that issues them")
