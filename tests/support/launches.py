"""Scripts on the ranks of the pool, with the variables that a real launcher would give them, but without its processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import ranks, trainers


def accelerate_environment(config: Path) -> dict[str, str]:
    """The variables that ``accelerate launch --config_file`` sets for its ranks, by accelerate's own code."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    words = ["--config_file", str(config), "--main_process_port", str(ranks._free_port()), "script.py"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = _validate_launch_command(launch_command_parser().parse_args(words))[0]
    _, made = prepare_deepspeed_cmd_env(arguments)
    return {name: value for name, value in made.items() if name != "PYTHONPATH" and os.environ.get(name) != value}


def launch_on_ranks(config: Path, script: Path, *words: str, group: bool = False, world: int = 2, **environment: str) -> str:
    """What ``accelerate launch --config_file config script words`` prints, on ranks of the pool.

    Args:
        config: The launcher's YAML.
        script: To be run as ``__main__``, in its own folder.
        *words: Of the script's command line.
        group: The process group is there before the script.
        world: Ranks.
        **environment: More variables.
    """
    variables = {**accelerate_environment(config), **environment}
    return "".join(ranks.run_ranks(_run, world, script, words, timeout=240, group=group, env=variables))


def _run(script: Path, words: Sequence[str]) -> str:
    before = sys.argv, sys.path[:], Path.cwd()
    printed = io.StringIO()
    sys.argv = [str(script), *words]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before[:2]
        os.chdir(before[2])
        trainers.forget()
    return printed.getvalue()


def report_of(printed: str) -> Any:
    """What a script printed as JSON behind the word REPORT, on one rank."""
    (line,) = [line for line in printed.splitlines() if line.startswith("REPORT ")]
    return json.loads(line.removeprefix("REPORT "))
