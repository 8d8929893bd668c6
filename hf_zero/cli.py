"""Implement the `hf-zero` command: `explain`, `plan`, `recipes`, `launch`, `trace`, `convert`, `report`; alone it prints the next steps.

This module parses arguments and prints; the logic is in other packages.

Exit codes: 0 success, 1 the configuration (or model, or checkpoint) has a mistake, 2 the command line is wrong. The exit codes of `plan`
are in `hf_zero/plan/command.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, TextIO, cast

from hf_zero import __version__
from hf_zero.errors import ConfigError, HfZeroError, PrintableStream, printable

try:
    from hf_zero import recipes as recipes_command
    from hf_zero.launch.command import launch as start
    from hf_zero.launch.flags import add_arguments
    from hf_zero.plan import command as plan_command
    from hf_zero.profiling import trace_command
except ConfigError as error:  # an environment variable of hf_zero has a wrong value
    sys.exit(f"hf-zero: {error}")

if TYPE_CHECKING:
    from hf_zero.config.mesh import Mesh
    from hf_zero.config.resolve import Analysis
    from hf_zero.config.table import Row

_STYLES = {"used": "green", "mapped": "cyan", "accepted": "dim", "refused": "bold red"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `hf-zero` command.

    Args:
        arguments: Command line without the program's name; None uses that of the process.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    try:
        with redirect_stdout(cast("TextIO", PrintableStream(sys.stdout))):
            code: int = options.run(options)
    except HfZeroError as error:
        print(f"hf-zero: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader (a pager, `head`) has closed the pipe
        sys.stderr.close()
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-zero", description="ZeRO training with DeepSpeed configuration files.")
    parser.set_defaults(run=_next_steps)
    parser.add_argument("--version", action="version", version=f"hf_zero {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    explain = commands.add_parser("explain", help="show what each key of a DeepSpeed configuration does here, and which mistakes it has")
    explain.add_argument("config", nargs="?", help="JSON file, JSON text or base64 text; may be left out with --tp")
    explain.add_argument("--model", help='local model folder, config.json or Hub ID, from which "auto" sizes are computed')
    explain.add_argument("--tp", type=_positive, metavar="N", help="print how --model is split over N tensor-parallel ranks, with reasons")
    explain.add_argument("--save-plan", metavar="FILE", help="with --tp: also write the plan as JSON, to edit and load")
    explain.add_argument("--world", type=_positive, metavar="N", help="number of ranks (default: the least that the configuration allows)")
    explain.add_argument("--source", action="append", default=[], type=_source, metavar="NAME=VALUE", help=_SOURCE_HELP)
    explain.add_argument("--strict", action="store_true", help="treat warnings as errors")
    explain.add_argument("--all", action="store_true", help="also list keys with their default value")
    explain.add_argument("--json", action="store_true", help="print rows, batch, warnings and errors as JSON")
    explain.set_defaults(run=_explain, usage_error=explain.error)
    plan = commands.add_parser("plan", help="predict memory, bytes sent and time of a run, also on hardware that you do not have")
    plan_command.add_arguments(plan)
    plan.set_defaults(run=plan_command.run)
    recipes = commands.add_parser("recipes", help="list or write configurations to start from, by task and number of GPUs")
    recipes_command.add_arguments(recipes)
    recipes.set_defaults(run=recipes_command.run)
    launch = commands.add_parser(
        "launch", allow_abbrev=False, help="start a script on several ranks, with the flags of DeepSpeed's launcher"
    )
    add_arguments(launch)
    launch.set_defaults(run=start)
    trace = commands.add_parser("trace", help="show which transfers of a recorded step overlapped with compute, as a trace and a picture")
    trace_command.add_arguments(trace)
    trace.set_defaults(run=trace_command.run)
    _add_convert(commands)
    report = commands.add_parser("report", help="print versions, devices and variables, to paste into a bug report")
    report.set_defaults(run=_report)
    return parser


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="convert checkpoints between hf_zero, DeepSpeed (read only), torch.distributed.checkpoint and Hugging Face models",
    )
    convert.add_argument(
        "source", help="folder or URL with one or several checkpoints, or folder with a model; the format is recognised from its files"
    )
    convert.add_argument("target", help="folder to write; with --to hf_zero also a URL")
    convert.add_argument(
        "--to",
        choices=("hf_zero", "hf", "dcp"),
        help="format to write: of hf_zero, a Hugging Face model, or torch.distributed.checkpoint (default: hf from hf_zero, else hf_zero)",
    )
    convert.add_argument("--tag", help="name of the checkpoint in the source and in the target (default: the name in the file latest)")
    convert.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="element type of the weights with --to hf (default fp32)"
    )
    convert.add_argument(
        "--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="largest size of one file with --to hf (default 5GB)"
    )
    convert.add_argument("--trust-pickle", action="store_true", help=_TRUST_HELP)
    convert.add_argument("--quiet", action="store_true", help="no progress bar")
    convert.set_defaults(run=_convert)


_TRUST_HELP = "read pickle files (*.pt, *.bin): only tensors and plain values are read; no code in them is imported or run"
_SOURCE_HELP = 'value of a training argument that replaces "auto", such as learning_rate=3e-5; may be given several times'


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks (1 or more)")
    return number


def _source(text: str) -> tuple[str, Any]:
    from hf_zero.config.auto import source_of

    try:
        return source_of(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> int:
    from hf_zero.system.sizes import bytes_of

    try:
        return bytes_of(text, "max_shard_size", bare=True)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _convert(options: argparse.Namespace) -> int:
    from hf_zero.checkpoint.convert.run import Conversion, convert
    from hf_zero.system.object_store import place_of

    wanted = Conversion(
        source=place_of(options.source),
        target=place_of(options.target),
        to=options.to,
        tag=options.tag,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_size,
        trust_pickle=options.trust_pickle,
        quiet=options.quiet,
    )
    print(convert(wanted))
    return 0


def _explain(options: argparse.Namespace) -> int:
    if options.tp is not None:
        if options.model is None:
            options.usage_error("--tp N needs --model, a local model folder, config.json or Hub ID")
        _explain_plan(options)
    if options.config is None:
        if options.tp is None:
            options.usage_error("the following arguments are required: config (or --model and --tp)")
        return 0
    from hf_zero.config.auto import infer_sources_from_model
    from hf_zero.config.mesh import Mesh, claims_of_config, least, solve
    from hf_zero.config.read import read_config
    from hf_zero.config.resolve import analyse
    from hf_zero.config.table import rows_of

    sources = dict(options.source)
    if options.model:
        sources = {**infer_sources_from_model(options.model), **sources}
    config, fault = read_config(options.config), None
    claims = claims_of_config(config)
    try:
        mesh = solve(claims, options.world) if options.world else least(claims)
    except HfZeroError as error:
        mesh, fault = Mesh(dp_shard=options.world or 1), error
    analysis = analyse(config, world_size=mesh.replicas, sources=sources, strict=options.strict)
    if fault is not None:
        analysis.problems.errors.append(str(fault))
    rows = rows_of(analysis.resolved, analysis.origin, everything=options.all)
    if options.json:
        _print_json(rows, analysis, mesh)
    else:
        _print_table(rows, analysis, mesh)
    return 1 if analysis.problems.found else 0


def _print_json(rows: Sequence[Row], analysis: Analysis, mesh: Mesh) -> None:
    problems, batch = analysis.problems, analysis.batch
    content = {
        "keys": [row._asdict() for row in rows],
        "batch": {
            "train_batch_size": batch.total,
            "train_micro_batch_size_per_gpu": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
            "data_parallel_size": batch.world_size,
        },
        "mesh": {**mesh.sizes, "ep": mesh.ep},
        "warnings": problems.warnings,
        "errors": problems.errors + problems.refusals + problems.mismatches,
    }
    print(json.dumps(content, indent=2))


def _print_table(rows: Sequence[Row], analysis: Analysis, mesh: Mesh) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    file = getattr(sys.stdout, "terminal", sys.stdout)  # bypass the escaping stream for colours; all texts are escaped below
    console = Console(file=file, soft_wrap=False)
    if not console.is_terminal and console.width < 160:
        console = Console(file=file, width=160)  # a file or pipe has no width of its own
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("key", no_wrap=True)
    for name in ("value", "source", "fate", "effect"):
        table.add_column(name, overflow="fold")
    for row in rows:
        key, value, source, effect = (Text(printable(text)) for text in (row.key, row.value, row.source, row.effect))
        table.add_row(key, value, source, Text(row.fate, style=_STYLES[row.fate]), effect)
    console.print(table)
    if mesh.ranks > mesh.dp_shard or mesh.ep > 1:
        console.print(Text(f"{mesh.ranks} ranks: {mesh}"))
    console.print(Text(analysis.batch.line()))
    for warning in analysis.problems.warnings:
        console.print(Text(printable(f"warning: {warning}"), style="yellow"))
    if analysis.problems.found:
        sys.stdout.flush()
        print(printable(f"\n{analysis.problems.report()}"), file=sys.stderr)


def _explain_plan(options: argparse.Namespace) -> None:
    from hf_zero.integrations.plan_table import plan_of_named_model

    plan = plan_of_named_model(options.model, options.tp)
    if options.save_plan:
        plan.save(options.save_plan)
    if options.json:
        print(json.dumps(plan.to_dict(), indent=2))
        return
    rows = [("module", "split", "source", "reason"), *plan.table()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]))
    for note in plan.notes:
        print(f"note: {note}")


_NEXT_STEPS = """\
hf_zero {version}: ZeRO training with DeepSpeed configuration files. `import deepspeed` is served by {answered}.

A script without Trainer    accelerate config             choose DeepSpeed
                            accelerate launch train.py
A Trainer script            TrainingArguments(..., deepspeed="ds.json"), or hf_zero.ZeroTrainingArguments(..., zero_stage=3)
A DeepSpeed script          hf-zero launch --num_gpus 2 train.py ...

hf-zero explain ds.json     show what each key of a configuration does here, and which mistakes it has
hf-zero plan MODEL ...      predict memory, bytes sent and time of a run, also on hardware that you do not have
hf-zero recipes             list or write configurations to start from, by task and number of GPUs
hf-zero plan --from FILE    translate settings of FSDP into a configuration, key by key
hf-zero trace FOLDER        show which transfers of a recorded step overlapped with compute
hf-zero report              print versions, devices and variables
hf-zero convert OLD NEW     convert checkpoints of DeepSpeed and torch.distributed.checkpoint, and Hugging Face models
hf-zero COMMAND --help      list the flags of a command"""


def _next_steps(options: argparse.Namespace) -> int:
    from hf_zero import __version__
    from hf_zero.environment import provider_of_deepspeed

    print(_NEXT_STEPS.format(version=__version__, answered=provider_of_deepspeed()))
    return 0


def _report(options: argparse.Namespace) -> int:
    from hf_zero.environment import as_text, environment_facts

    print(as_text(environment_facts()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
