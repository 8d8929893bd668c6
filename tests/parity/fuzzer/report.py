"""Scripts of the fuzzer by hand: ``python -m tests.parity.fuzzer.report``, from the root of the repository.

- ``run "add_adapter layer=blocks.0 how=group trains=1; forward data=0; ..."`` (or a file) at all stages, precisions and numbers of ranks;
  a ``cell`` line in front sets what else matters (``--here``: runs at that cell alone).
- ``known`` runs the scripts of ``script_known.KNOWN_OPEN`` where they fail: an entry all of whose scripts are good can be deleted.
- ``table`` runs every operation with every argument in every place, and prints a line for each with its verdicts.
- ``explore --count 300 --seed 1`` draws scripts, nothing left out, and prints what fails, made small (``--split 2``: over split layers,
  ``--stages 2``: over a pipeline, ``--experts 2``: over ranks that divide experts, ``--sequences 2``: over ranks that divide sequences, in
  all ways in turn or in one ``--way``; ``--under node_copies host``: with settings that must change no result, each in turn).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.parity.fuzzer.engine import UNDER
from tests.parity.fuzzer.grammar import (
    EXPERT_PARAMETERS,
    KINDS,
    NEEDS,
    WAYS,
    Cell,
    Operation,
    Script,
    cell_text,
    keep_valid,
    parse,
    scripts,
    simpler,
    valid,
    variants,
)
from tests.parity.fuzzer.known import KNOWN_OPEN
from tests.parity.fuzzer.verdict import Verdict, verdicts_of
from tests.support import ranks

CELLS = [Cell(stage=stage, dtype=dtype, ranks=world) for stage in range(4) for dtype in ("fp32", "bf16") for world in (1, 2)]
SOME_CELLS = [cell for cell in CELLS if cell.stage != 1 and (cell.ranks == 2 or cell.stage != 2 and cell.dtype == "fp32")]  # of the table
TIMEOUT = 15.0  # seconds of a wait that is a hang: by hand somebody looks at it


def everywhere(script: Script) -> list[Script]:
    """Return the script at all stages, precisions and numbers of ranks, with the other settings of its cell."""
    return [script._replace(cell=replace(script.cell, stage=cell.stage, dtype=cell.dtype, ranks=cell.ranks)) for cell in CELLS]


def split_over(script: Script, split: int = 1, stages: int = 1) -> Script:
    """Return the script with as many groups of ranks as it has ranks, each of which holds one model, without what makes no sense there.

    In fp32, because 16-bit sums over a group are rounded otherwise than those of one rank. Stages have buffers of their own, and run the
    layers that they have recomputed in other pieces.
    """
    cell = replace(script.cell, ranks=script.cell.ranks * split * stages, split=split, stages=stages, dtype="fp32")
    if stages > 1:
        cell = replace(cell, buffers=0, recompute="none", stage=min(cell.stage, 1))
    return script._replace(cell=cell, operations=tuple(keep_valid(script._replace(cell=cell))))


def among_experts(script: Script, experts: int, mixture: str) -> Script:
    """Return the script over as many groups of ranks as it has ranks, each of which holds all experts; in fp32, as above."""
    cell = replace(script.cell, ranks=script.cell.ranks * experts, experts=experts, mixture=mixture, dtype="fp32")
    names = EXPERT_PARAMETERS[mixture]
    renamed = [
        one._replace(args=tuple((key, names.get(value, value) if key == "param" else value) for key, value in one.args))
        for one in script.operations
    ]
    script = Script(cell, tuple(renamed))
    return script._replace(operations=tuple(keep_valid(script)))


def over_sequences(script: Script, size: int, way: str) -> Script:
    """Return the script over as many groups of ranks as it has ranks, one if they are large, each of which divides its sequences; in fp32
    and without buffers, because sums over parts are rounded otherwise, and each rank has the statistics of its own part.
    """
    cell = replace(script.cell, ranks=max(size, min(script.cell.ranks * size, 4)), sequences=size, way=way, dtype="fp32", buffers=0)
    script = script._replace(cell=cell)
    return script._replace(operations=tuple(keep_valid(script)))


def under(script: Script, name: str) -> Script:
    """Return the script with settings of ``UNDER``, on as many ranks and at a stage for which they mean something; on four in fp32."""
    _, worlds, stages = UNDER[name]
    world = script.cell.ranks if script.cell.ranks in worlds else worlds[-1]
    stage = script.cell.stage if script.cell.stage in stages else stages[-1]
    cell = replace(script.cell, ranks=world, stage=stage, under=name, dtype="fp32" if world > 2 else script.cell.dtype)
    script = script._replace(cell=cell)
    return script._replace(operations=tuple(keep_valid(script)))


def draw(count: int, start: int | None = None) -> list[Script]:
    """Draw ``count`` different scripts; ``start`` seeds hypothesis, None uses the settings of the run."""
    found: list[Script] = []

    def collect(script: Script) -> None:
        found.append(script)

    options = settings(
        max_examples=3 * count, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    test = options(given(scripts())(collect))
    (test if start is None else seed(start)(test))()
    return _unlike(found)[:count]


def _unlike(found: Sequence[Script]) -> list[Script]:
    """Return the scripts without near copies of earlier ones: hypothesis often changes an example only a little."""
    kept = list(found[:1])
    for script in found[1:]:
        if script.cell != kept[-1].cell or len(set(script.operations) ^ set(kept[-1].operations)) > 4:
            kept.append(script)
    return kept


def shrink(
    script: Script, verdict: Verdict, judge: Callable[[Sequence[Script]], list[Verdict]], rounds: int = 12
) -> tuple[Script, Verdict]:
    """Return a minimal script with the same kind of verdict; each round tries all scripts that are a little simpler."""
    for _ in range(rounds):
        tried = [one for one in dict.fromkeys(simpler(script)) if valid(one)]
        found = next(((one, seen) for one, seen in _in_parts(tried, judge) if seen.word == verdict.word), None)
        if found is None:
            break
        script, verdict = found
    return script, verdict


def _in_parts(tried: list[Script], judge: Callable[[Sequence[Script]], list[Verdict]]) -> Iterator[tuple[Script, Verdict]]:
    """Yield scripts with their verdicts in order, judged a few at a time, so that the caller can stop at the first suitable one."""
    for start in range(0, len(tried), 6):
        part = tried[start : start + 6]
        yield from zip(part, judge(part), strict=True)


def quickly(found: Sequence[Script]) -> list[Verdict]:
    """Return the verdicts with the short time limit."""
    return verdicts_of(found, timeout=TIMEOUT)


def table(names: Sequence[str]) -> Iterator[tuple[str, list[tuple[Script, Verdict]]]]:
    """Return each operation with each of its arguments in each place of a short training, in most cells."""
    rows = [row for row in _rows() if not names or row[0].split()[0] in names]
    for start in range(0, len(rows), 10):  # jobs are shared
        part = rows[start : start + 10]
        found = iter(quickly([script for _, tried in part for script in tried]))
        yield from ((line, [(script, next(found)) for script in tried]) for line, tried in part)


def _rows() -> Iterator[tuple[str, list[Script]]]:
    for name, kind in KINDS.items():
        for operation in variants(name):
            for gap in kind.gaps if _is_shown(operation) else "":
                yield f"{operation} @{gap}", [one for cell in SOME_CELLS if (one := around(operation, gap, cell)) is not None]


def _is_shown(operation: Operation) -> bool:
    """Return whether the arguments use one batch and one of two parameters: a matrix and a small vector."""
    data, param, layer = operation.get("data"), operation.get("param"), operation.get("layer")
    params = (None, "blocks.0.up.weight", *(["blocks.1.gain"] if operation.name in ("write", "gather_write") else []))
    return data in (None, 20) and param in params and layer in (None, "blocks.0", "head")


def around(operation: Operation, gap: str, cell: Cell) -> Script | None:
    """Return a training of three steps with ``operation`` in the second, and the operations that it needs before; None if it makes no
    sense.
    """
    if operation.name == "unfreeze":
        cell = replace(cell, frozen=str(operation.get("layer")))
    lines = [str(NEEDS.get(operation.name, "")), "forward data=0", "backward", "step"]
    for place, line in (("a", "forward data=1"), ("b", "backward"), ("c", "step")):
        lines += [str(operation) if place == gap.replace("z", "a") else "", line]
    script = parse("\n".join([cell_text(cell), *lines, "save_model", "forward data=2", "backward", "step", "evaluate data=21"]))
    return script if len(keep_valid(script)) == len(script.operations) else None


def _summary(results: Sequence[tuple[Script, Verdict]]) -> str:
    words = Counter(verdict.word for _, verdict in results)
    parts = []
    for word, count in words.items():
        cells = [script.cell for script, verdict in results if verdict.word == word]
        where = "" if count == len(results) else " at " + _cells(cells)
        parts.append(f"{word}{where}")
    return "; ".join(parts)


def _cells(cells: Sequence[Cell]) -> str:
    short: dict[tuple[str, int], list[int]] = {}
    for cell in cells:
        short.setdefault((cell.dtype, cell.ranks), []).append(cell.stage)
    return ", ".join(f"{dtype}/{world}r stage {'/'.join(map(str, sorted(stages)))}" for (dtype, world), stages in short.items())


def _run(arguments: argparse.Namespace) -> None:
    path = Path(arguments.script)
    script = parse(path.read_text() if len(arguments.script) < 200 and path.is_file() else arguments.script)
    tried = [script] if arguments.here else everywhere(script)
    tried = [one for one in tried if valid(one)]
    for one, verdict in zip(tried, quickly(tried), strict=True):
        print(_told(one, verdict, arguments.width), flush=True)


def _told(script: Script, verdict: Verdict, width: int) -> str:
    place, count = verdict.place, len(script.operations)
    where = "" if place < 0 else f" at {place} ({script.operations[place] if place < count else 'end'})"
    return f"{cell_text(script.cell)}: {verdict.word}{where} {verdict.text[:width]}"


def _known(arguments: argparse.Namespace) -> None:
    for known in KNOWN_OPEN:
        tried = [parse(text) for text in known.scripts]
        results = list(zip(tried, quickly(tried), strict=True))
        state = "closed, delete it" if all(verdict.good for _, verdict in results) else "open"
        print(f"{state}: {known.issue} {known.pattern}: {', '.join(verdict.word for _, verdict in results)}", flush=True)


def _table(arguments: argparse.Namespace) -> None:
    for line, results in table(arguments.names):
        print(f"{line}: {_summary(results)}", flush=True)
        for script, verdict in [(script, verdict) for script, verdict in results if not verdict.good][: arguments.examples]:
            print(f"    {_told(script, verdict, arguments.width)}")


def _explore(arguments: argparse.Namespace) -> None:
    drawn = draw(arguments.count, arguments.seed)
    if arguments.split * arguments.stages > 1:
        drawn = [split_over(script, arguments.split, arguments.stages) for script in drawn]
    if arguments.experts > 1:
        drawn = [among_experts(script, arguments.experts, arguments.mixture) for script in drawn]
    if arguments.sequences > 1:
        ways = [arguments.way] if arguments.way else list(WAYS[:3] if arguments.sequences < 4 else WAYS[1:])
        drawn = [over_sequences(script, arguments.sequences, ways[place % len(ways)]) for place, script in enumerate(drawn)]
    if arguments.under:
        drawn = [under(script, arguments.under[place % len(arguments.under)]) for place, script in enumerate(drawn)]
    if arguments.skip_known:
        from tests.parity.fuzzer.known import without_known

        drawn = [without_known(script) for script in drawn]
    results = list(zip(drawn, quickly(drawn), strict=True))
    print(Counter(verdict.word for _, verdict in results), flush=True)
    for script, verdict in [(script, verdict) for script, verdict in results if not verdict.good][: arguments.examples]:
        small, seen = (script, verdict) if arguments.as_drawn else shrink(script, verdict, quickly)
        print(f"--- {seen.word} at {seen.place}: {seen.text[: arguments.width]}\n{small}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=300, help="characters of a message")
    parser.add_argument("--examples", type=int, default=1000, help="failures that are shown")
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run")
    run.add_argument("script")
    run.add_argument("--here", action="store_true")
    run.set_defaults(call=_run)
    commands.add_parser("known").set_defaults(call=_known)
    whole = commands.add_parser("table")
    whole.add_argument("names", nargs="*", help="of operations; all by default")
    whole.set_defaults(call=_table)
    explore = commands.add_parser("explore")
    explore.add_argument("--count", type=int, default=100)
    explore.add_argument("--seed", type=int, default=None)
    explore.add_argument("--split", type=int, default=1, help="ranks that hold each layer together")
    explore.add_argument("--stages", type=int, default=1, help="stages of a pipeline")
    explore.add_argument("--experts", type=int, default=1, help="ranks that hold the experts of each layer together")
    explore.add_argument("--mixture", default="listed", choices=list(EXPERT_PARAMETERS), help="kind of the experts")
    explore.add_argument("--sequences", type=int, default=1, help="ranks that divide each sequence")
    explore.add_argument("--way", default="", choices=WAYS, help="how they do it; each in turn by default")
    explore.add_argument("--under", nargs="+", choices=UNDER, help="settings that must change no result, each in turn")
    explore.add_argument("--skip-known", action="store_true", help="leave out what KNOWN_OPEN has")
    explore.add_argument("--as-drawn", action="store_true", help="failures are not made small")
    explore.set_defaults(call=_explore)
    arguments = parser.parse_args()
    try:
        arguments.call(arguments)
    finally:
        ranks.close_pools()


if __name__ == "__main__":
    main()
