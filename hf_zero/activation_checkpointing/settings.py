"""The ``activation_checkpointing`` section as settings."""

from __future__ import annotations

from hf_zero.activation_checkpointing import CheckpointSettings
from hf_zero.config.schema.storage import ActivationCheckpointing


def checkpoint_settings(section: ActivationCheckpointing) -> CheckpointSettings:
    """What the section asks for."""
    return CheckpointSettings(
        to_host=section.cpu_checkpointing,
        divided=section.partition_activations,
        synchronize=section.synchronize_checkpoint_boundary,
        profile=section.profile,
    )
