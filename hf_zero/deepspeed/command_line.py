"""What DeepSpeed gives to command lines: the script arguments and the name of the multi-node environment file."""

from __future__ import annotations

import argparse
import os

# accelerate imports this name on every `accelerate launch` with DeepSpeed and appends to the file on several nodes only.
DEEPSPEED_ENVIRONMENT_NAME: str = os.environ.get("DS_ENV_FILE", ".deepspeed_env")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--deepspeed`` and ``--deepspeed_config`` to ``parser``, for scripts that call ``initialize(args=args)``.

    Args:
        parser: The script's parser; it is changed.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations, served by hf_zero")
    group.add_argument("--deepspeed", default=False, action="store_true", help="Use the engine (the script decides what that means)")
    group.add_argument("--deepspeed_config", default=None, type=str, help="Path of the DeepSpeed JSON file")
    return parser
