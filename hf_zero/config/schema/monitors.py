"""Sections of the monitors that training records are written to."""

from __future__ import annotations

from typing import Annotated, Literal

from hf_zero.config.schema.fields import ANY_CASE, Bool, Count, Section, used


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
