"""Implement the `deepspeed` command (`hf-zero launch`, or a real DeepSpeed's), and the arguments that DeepSpeed adds to scripts."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from hf_zero.deepspeed.alias.finder import SWITCH, alias_is_active
from hf_zero.errors import HfZeroError
from hf_zero.launch.command import launch
from hf_zero.launch.flags import add_arguments

_RUNNER = "deepspeed.launcher.runner"
# accelerate imports this name on every `accelerate launch` with DeepSpeed and appends to the file on several nodes only.
DEEPSPEED_ENVIRONMENT_NAME: str = os.environ.get("DS_ENV_FILE", ".deepspeed_env")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `deepspeed` command of the package that serves `import deepspeed`, whichever of the two was installed last.

    Args:
        arguments: Command line without the program's name; None uses that of the process.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        ours = alias_is_active()
    except HfZeroError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        return 1
    if ours:
        return _launch(words)
    try:
        runner = importlib.import_module(_RUNNER)
    except ImportError as error:
        print(f"deepspeed: {SWITCH} turns hf_zero's alias off, and no other DeepSpeed is installed: {error}", file=sys.stderr)
        return 1
    runner.main(words)
    return 0


def _launch(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="hf-zero launch", allow_abbrev=False)
    add_arguments(parser)
    try:
        return launch(parser.parse_args(words))
    except HfZeroError as error:
        print(f"hf-zero: {error}", file=sys.stderr)
        return 1


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to ``parser``, for scripts that call ``initialize(args=args)``.

    Args:
        parser: The script's parser; it is changed.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations for hf_zero")
    group.add_argument("--deepspeed", default=False, action="store_true", help="Use the engine; the script reads this flag")
    group.add_argument("--deepspeed_config", default=None, type=str, help="Path of the DeepSpeed JSON file")
    return parser
