"""The `deepspeed` command: `hf-zero launch` under the name that scripts and accelerate call, or a real DeepSpeed's where there is one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from hf_zero.cli import main as hf_zero_main
from hf_zero.deepspeed.finder import SWITCH, alias_is_active
from hf_zero.errors import HfZeroError

_RUNNER = "deepspeed.launcher.runner"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; whoever answers for `import deepspeed` answers here too, in whichever order both were installed.

    Args:
        arguments: Command line without the program's name, by default that of the process.

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
        return hf_zero_main(["launch", *words])
    try:
        runner = importlib.import_module(_RUNNER)
    except ImportError as error:
        print(f"deepspeed: {SWITCH} keeps hf_zero from answering, and there is no other DeepSpeed: {error}", file=sys.stderr)
        return 1
    runner.main(words)
    return 0
