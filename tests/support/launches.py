"""Run scripts on the ranks of the pool, with the variables that a real launcher would set, but without its processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support import ranks, trainers
from tests.support.processes import REPO, Ended, ended_in, environment, forking_program, inside


def accelerate_environment(config: Path, flags: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that ``accelerate launch --config_file`` sets for its ranks, by running the launcher without starting ranks."""
    import torch.distributed.run
    from accelerate.commands.launch import launch_command, launch_command_parser

    found: dict[str, str] = {}
    words = ["--config_file", str(config), "--main_process_port", str(ranks._free_port()), *flags, "script.py"]
    with inside(REPO), mock.patch.object(torch.distributed.run, "run", lambda _: found.update(os.environ)):
        launch_command(launch_command_parser().parse_args(words))
    assert found, "the launcher started nothing"
    return {name: value for name, value in found.items() if name != "PYTHONPATH" and os.environ.get(name) != value}


def launch_on_ranks(
    config: Path, script: Path, *words: str, group: bool = False, world: int = 2, flags: Sequence[str] = (), **environment: str
) -> str:
    """Return the output of ``accelerate launch --config_file config script words``, on ranks of the pool.

    Args:
        config: The launcher's YAML.
        script: Path of the script, run as ``__main__`` in the root of the repository.
        *words: Words of the script's command line.
        group: Create the process group before the script runs.
        world: Number of ranks.
        flags: Flags of the launcher.
        **environment: Additional variables.
    """
    return run_on_ranks(script, *words, group=group, world=world, **accelerate_environment(config, flags), **environment)


def run_on_ranks(script: Path, *words: str, group: bool = False, world: int = 2, folder: Path = REPO, **environment: str) -> str:
    """Return the output of ``torchrun --nproc_per_node world script words``, on ranks of the pool that work in ``folder``.

    The other arguments are those of ``launch_on_ranks``.
    """
    return "".join(ranks.run_ranks(_run, world, script, words, folder, timeout=240, group=group, env=environment))


def _run(script: Path, words: Sequence[str], folder: Path) -> str:
    modules, printed = set(sys.modules), io.StringIO()
    path = [str(script.parent), *sys.path]
    with contextlib.ExitStack() as stack:
        stack.callback(trainers.forget)
        stack.enter_context(mock.patch.multiple(sys, argv=[str(script), *words], path=path))
        if "HF_DATASETS_CACHE" in os.environ:  # datasets has read it at its import
            import datasets

            stack.enter_context(mock.patch.object(datasets.config, "HF_DATASETS_CACHE", Path(os.environ["HF_DATASETS_CACHE"])))
        stack.enter_context(inside(folder))
        stack.enter_context(contextlib.redirect_stdout(printed))
        runpy.run_path(str(script), run_name="__main__")
    for name in sys.modules.keys() - modules:  # modules of the script's folders, whose names the next script may use
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(script.parents[1]):
            del sys.modules[name]
    return printed.getvalue()


def run_warm(codes: Mapping[str, str], folder: Path, imports: str) -> dict[str, Ended]:
    """Run pieces of code like ``processes.run_forked`` without the whole end, as forks of the server of ranks.

    The server has imported torch, transformers and nearly all of hf_zero: for codes to which only ``imports`` matter, nothing else.
    """
    ranks.run_alone(_play, forking_program(codes, folder, imports, whole_end=False), folder, environment())
    return ended_in(folder)


def _play(program: str, folder: Path, variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(REPO)
    sys.argv = ["-c", str(folder)]
    with contextlib.suppress(SystemExit):
        exec(program, {"__name__": "__main__"})


def report_of(printed: str) -> Any:
    """Return the JSON that a script printed after the word REPORT, on one rank."""
    (line,) = [line for line in printed.splitlines() if line.startswith("REPORT ")]
    return json.loads(line.removeprefix("REPORT "))
