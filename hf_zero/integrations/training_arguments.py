"""Define ``TrainingArguments`` with typed ZeRO fields, for Trainer scripts with or without a DeepSpeed JSON."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from hf_zero.assembly.mesh import fits_own_node
from hf_zero.config.mesh import claims_of_config, claims_of_environment, claims_of_sizes, solve
from hf_zero.config.read import read_config
from hf_zero.config.resolve import resolve
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.integrations.typed_values import config_of_launcher, fill_missing

__all__ = ["ZeroTrainingArguments"]

_DEVICES = ("none", "cpu", "nvme")
_TYPES = ("fp32", "fp16", "bf16")
# field -> dotted key of the configuration
_KEYS = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer": "zero_optimization.offload_optimizer.device",
    "offload_param": "zero_optimization.offload_param.device",
    "gather_16bit_weights_on_model_save": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "overlap_comm": "zero_optimization.overlap_comm",
    "communication_data_type": "communication_data_type",
    "steps_per_print": "steps_per_print",
    "checkpoint_url": "hf_zero.checkpoint_url",
}
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "offload_optimizer": _DEVICES,
    "offload_param": _DEVICES,
    "communication_data_type": _TYPES,
}
_AT_LEAST = {
    "tensor_parallel_size": 1,
    "expert_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "param_persistence_threshold": 0,
    "prefetch_bucket_size": 0,
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
    "steps_per_print": 0,
}
# Keys that Trainer fills from its own arguments if there is no JSON.
_FROM_ARGUMENTS = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
}


def _option(description: str, choices: tuple[Any, ...] | None = None) -> Any:
    metadata: dict[str, Any] = {"help": description}
    if choices is not None:
        metadata["choices"] = list(choices)
    return field(default=None, metadata=metadata)


@dataclass
class ZeroTrainingArguments(TrainingArguments):
    """Add typed ZeRO fields to the ``TrainingArguments`` of transformers; the class works with ``HfArgumentParser``.

    A field fills a value that the configuration in ``deepspeed`` (or the launcher's) lacks or leaves on "auto". The constructor reports
    all mistakes in one error: fields out of range, fields that contradict the configuration, values of the configuration that contradict
    other training arguments, and mistakes inside the configuration. After construction ``deepspeed`` is the complete configuration, a dict.

    On a machine without accelerator ``use_cpu`` is set to True, so that ``bf16=True`` is allowed there.

    Raises:
        ConfigError: There are mistakes; the message lists all of them.
    """

    zero_stage: int | None = _option(
        "ZeRO stage, which selects the sharded tensors: 0 none, 1 optimizer states, 2 also gradients, 3 also parameters (default 2).",
        (0, 1, 2, 3),
    )
    offload_optimizer: str | None = _option("Device that stores optimizer states between steps.", _DEVICES)
    offload_param: str | None = _option("Device that stores parameters between uses; needs stage 3.", _DEVICES)
    nvme_path: str | None = _option("Folder on a fast disk for states and parameters that are offloaded to nvme.")
    tensor_parallel_size: int | None = _option("Number of ranks that hold one copy of each layer together.")
    pipeline_parallel_size: int | None = _option("Number of pipeline stages; each stage holds some layers of the model.")
    expert_parallel_size: int | None = _option("Number of ranks that hold all experts of a layer together.")
    gather_16bit_weights_on_model_save: bool | None = _option(
        "No effect: save_model writes unsharded weights at stage 3 in any case. The value false causes one warning."
    )
    param_persistence_threshold: int | None = _option("Stage 3: units of at most this many elements stay unsharded.")
    prefetch_bucket_size: int | None = _option("Stage 3: elements gathered ahead of use.")
    max_live_parameters: int | None = _option("Stage 3: number of elements that may be unsharded at the same time.")
    max_reuse_distance: int | None = _option("Stage 3: a unit stays unsharded if it is used again within this many elements.")
    overlap_comm: bool | None = _option("Whether gradients are reduced while backward is running.")
    communication_data_type: str | None = _option("Element type of gradients in collectives.", _TYPES)
    steps_per_print: int | None = _option("Steps between two progress lines of the engine; 0 prints none.")

    checkpoint_url: str | None = _option(
        "URL in an object store (s3://bucket/run) for the engine's checkpoints and Trainer's small files beside them."
    )

    hf_zero_checks_itself: ClassVar[bool] = True  # see ``early_checks``

    def __post_init__(self) -> None:
        problems = self._range_problems()
        source = self.deepspeed or config_of_launcher()
        config = read_config(source) if source else {}
        if not source:
            config |= {key: dict(value) if isinstance(value, dict) else value for key, value in _FROM_ARGUMENTS.items()}
        for key, found, value in fill_missing(config, {} if problems else self._values(bool(source))):
            problems.append(f"- {key}: the configuration says {found!r}, ZeroTrainingArguments was given {value!r}")
        config["zero_optimization"].setdefault("stage", 2)
        self.deepspeed = config
        if not torch.accelerator.is_available():
            self.use_cpu = True
        super().__post_init__()
        problems += [f"{line} (configuration and training argument)" for line in self.hf_deepspeed_config.mismatches]
        problems += self._mistakes_inside()
        if problems:
            raise ConfigError(
                "These settings do not fit together:\n"
                + "\n".join(problems)
                + '\nChange them, drop the argument, or write "auto" in the configuration.'
            )

    def _values(self, has_config: bool) -> dict[str, Any]:
        """Return the typed values by dotted key of the configuration; None for a field that was not given."""
        values = {key: getattr(self, name) for name, key in _KEYS.items()}
        for name in ("offload_optimizer", "offload_param"):
            if getattr(self, name) == "nvme":
                values[f"zero_optimization.{name}.nvme_path"] = self.nvme_path
        if self.tensor_parallel_size not in (None, 1):
            values["tensor_parallel.autotp_size"] = self.tensor_parallel_size
        if self.pipeline_parallel_size not in (None, 1):
            values["pipeline.stages"] = self.pipeline_parallel_size
        if self.expert_parallel_size not in (None, 1):
            values["expert_parallel.enabled"] = True
            values["expert_parallel.autoep_size"] = self.expert_parallel_size
        gather = _KEYS["gather_16bit_weights_on_model_save"]
        if not has_config and values[gather] is None:
            values[gather] = True
        return values

    def _range_problems(self) -> list[str]:
        problems = []
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value not in allowed):
                problems.append(f"- {name} is {value!r}; allowed are {', '.join(map(repr, allowed))}")
        for name, lowest in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < lowest):
                problems.append(f"- {name} is {value!r}; a whole number of at least {lowest} is allowed")
        on_nvme = [name for name in ("offload_optimizer", "offload_param") if getattr(self, name) == "nvme"]
        if on_nvme and not self.nvme_path and not (self.deepspeed or config_of_launcher()):
            problems.append(f"- {' and '.join(on_nvme)} is 'nvme', but nvme_path is not set; set nvme_path to a folder")
        if self.nvme_path and not on_nvme:
            problems.append(f"- nvme_path is {self.nvme_path!r}, but nothing is offloaded to nvme; set offload_optimizer or offload_param")
        if self.offload_param in ("cpu", "nvme") and self.zero_stage not in (None, 3):
            problems.append(
                f"- offload_param is {self.offload_param!r} with zero_stage {self.zero_stage}; parameters are offloaded at stage 3"
            )
        return problems

    def _mistakes_inside(self) -> list[str]:
        """Return the errors that the engine would raise for the configuration, so that they are reported before a model is built."""
        config = self.hf_deepspeed_config.config
        try:
            claims = [*claims_of_config(config), *claims_of_sizes(getattr(self, "parallelism_config", None))]
            mesh = solve([*claims, *claims_of_environment(os.environ)], self.world_size, fits_own_node)
            # Trainer computes train_batch_size over every rank; initialize corrects it where ranks share samples.
            told = {key: value for key, value in config.items() if mesh.sharers == 1 or key != "train_batch_size"}
            resolve(told, world_size=mesh.replicas, match_sources=False)
        except (ConfigError, UnsupportedError) as error:
            return [str(error)]
        return []
