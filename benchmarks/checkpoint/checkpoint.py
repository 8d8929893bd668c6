"""Time to save, to stall for a save in the background, and to load: hf_zero, torch.distributed.checkpoint, DeepSpeed on one model.

    python -m benchmarks.checkpoint.checkpoint                                    # GPT-2, 70 M parameters, 2 gloo ranks
    python -m benchmarks.checkpoint.checkpoint --peer-python /path/to/venv-with-deepspeed/bin/python
    python -m benchmarks.checkpoint.checkpoint --layers 2 --width 128 --rounds 1  # quick check

In each round every contender saves, loads, and saves in the background once, in an order that rotates from round to round. Right before
and right after each save of hf_zero the same processes write the same number of bytes plainly in windows of 4 MiB and force them to the
disk (the disk's sequential rate), through the page cache and past it; around each save in the background they copy the shards to memory
that is already allocated. A round's ratio is the mean of both over the save; ratios are medians over rounds, with the smallest and
largest. Times are the slowest rank's. hf_zero and torch.distributed.checkpoint force their files to the disk, DeepSpeed does not. Loading
reads from the page cache: all files of the other libraries, and those of hf_zero's files that were written through it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.processes import REPOSITORY, RUNNER
from benchmarks.common.tables import ResultTable

WORKER = Path(__file__).with_name("checkpoint_worker.py")
WORLD = 2


@dataclass
class Ranks:
    """The rank processes of one contender.

    Attributes:
        seconds: Seconds of each kind of request, by round.
        seen: Memory of a save and bytes read by a load.
        nbytes: Bytes of its checkpoint.
    """

    name: str
    processes: list[subprocess.Popen[str]]
    log: Any
    seconds: dict[str, list[float]] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0

    def ask(self, **request: Any) -> dict[str, float]:
        """Make every rank carry out a request, after all earlier writes have reached the disk; return the largest of each number over
        ranks.
        """
        if request["do"] != "rest":
            os.sync()
        for process in self.processes:
            process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        answers = [self.answer(process) for process in self.processes]
        found = {name: max(float(answer[name]) for answer in answers) for name in answers[0]}
        self.seconds.setdefault(request["do"], []).append(found["seconds"])
        return found

    def answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Read a rank's answer.

        Raises:
            RuntimeError: The rank ended; the message has the last lines that it printed.
        """
        line = process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"{self.name}: a rank ended with code {process.wait(10)}\n{self.log.read()[-3000:]}")
        return json.loads(line)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.log.close()


def start(name: str, python: str, size: dict[str, int]) -> Ranks:
    """Start the ranks of a contender and wait until its model has taken a step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tempfile.TemporaryFile("w+", prefix="checkpoint_")  # noqa: SIM115 - closed by Ranks.stop
    processes = []
    for rank in range(WORLD):
        launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1"}
        settings = {
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
            "DS_ACCELERATOR": "cpu",
            "DS_BUILD_OPS": 0,
            "TRANSFORMERS_VERBOSITY": "error",
        }
        env = {**os.environ, **{key: str(value) for key, value in (launch | settings).items()}}
        if name.startswith("hf_zero"):
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
        command = [python, str(RUNNER), str(WORKER), name, json.dumps(size)]
        processes.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True))
    ranks = Ranks(name, processes, log)
    for process in processes:
        ranks.answer(process)
    return ranks


def bytes_below(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def one_turn(contender: Ranks, folder: Path) -> None:
    """Run each timed operation of a contender once: saves, loads, stalls of the training."""
    place = str(folder / contender.name)
    if contender.name.endswith("background"):
        contender.ask(do="copy")
        contender.ask(do="stall", folder=place)
        contender.ask(do="rest")
        contender.ask(do="copy")
        return
    beside = contender.name.startswith("hf_zero")
    _write_beside(contender, place, beside)
    contender.ask(do="save", folder=place)
    contender.nbytes = bytes_below(Path(place))
    _write_beside(contender, place, beside)
    contender.ask(do="load", folder=place)
    if contender.name == "dcp":
        contender.ask(do="stall", folder=f"{place}-background")
        contender.ask(do="rest")


def _write_beside(contender: Ranks, place: str, wanted: bool) -> None:
    """Write as many bytes as the last save did, through the page cache and past it."""
    for way in ("disk", "direct") if wanted else ():
        contender.ask(do=way, folder=f"{place}-{way}", nbytes=contender.nbytes // WORLD)
        for path in Path(place).parent.glob(f"{Path(place).name}-{way}-*"):
            path.unlink()


def measure(contenders: list[Ranks], folder: Path, rounds: int, console: Console) -> None:
    """Run all rounds, then measure each contender's memory and reads."""
    for number in range(rounds + 1):  # the first round warms up
        first = number % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            one_turn(contender, folder)
            _empty(folder)
        console.print(f"[dim]round {number} of {rounds}[/dim]")
    for contender in contenders:
        contender.seconds = {kind: taken[len(taken) // (rounds + 1) :] for kind, taken in contender.seconds.items()}
        if contender.nbytes:
            contender.seen = contender.ask(do="inspect", folder=str(folder / contender.name))
            _empty(folder)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


COLUMNS = {
    "save": "save s",
    "load": "load s",
    "stall": "stall s",
    "rest": "rest s",
    "copy": "copy s",
    "disk": "disk s",
    "direct": "direct s",
}
TARGETS = ("stall / copy (<= 1.20)", "disk / save (>= 0.90)", "direct / save", "extra MiB in a save (<= 64)", "read / share (<= 1.1)")


def rows_of(contenders: list[Ranks]) -> list[list[str]]:
    """Return one row per contender: bytes, median seconds, and the ratios that have a target."""
    rows = []
    for contender in contenders:
        seconds = contender.seconds
        row = [contender.name, f"{contender.nbytes / 2**20:.0f}" if contender.nbytes else ""]
        row += [f"{statistics.median(seconds[kind]):.3f}" if kind in seconds else "" for kind in COLUMNS]
        row.append(ratio_text(seconds["stall"], _around(seconds["copy"])) if "copy" in seconds else "")
        row += [ratio_text(_around(seconds[way]), seconds["save"]) if way in seconds else "" for way in ("disk", "direct")]
        row.append(f"{contender.seen['grown'] / 2**20:.0f}" if contender.seen else "")
        row.append(f"{contender.seen['read'] * WORLD / contender.nbytes:.2f}" if contender.seen else "")
        rows.append(row)
    return rows


def _around(taken: list[float]) -> list[float]:
    """Return for each round the mean of the measurements before and after."""
    return [(before + after) / 2 for before, after in zip(taken[::2], taken[1::2], strict=True)]


def ratio_text(first: list[float], second: list[float]) -> str:
    """Return the median, smallest and largest of the rounds' ratios as text."""
    ratios = [one / other for one, other in zip(first, second, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


TEXT = """Seconds of the slowest rank, medians of {rounds} rounds; GPT-2 with {layers} layers of width {width} and vocabulary {vocab},
bf16 with fp32 masters and both moments of Adam, {world} gloo ranks. **save**: until everything is on the disk. **stall**, **rest**: of a
background save, time that stops training, and the rest. **disk**, **direct**: the same bytes written with `fsync`, through and past the
page cache. **copy**: a rank's masters and moments copied in memory. DeepSpeed does not force its files to the disk. **load**: hf_zero
reads from the disk, the others from memory. **extra**: host memory that a save adds; **read**: bytes read by a rank relative to its
share. Targets in parentheses."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: a temporary folder)")
    parser.add_argument("--only", nargs="+", help="these contenders only")
    parser.add_argument("--peer-python", help="Python of a venv with deepspeed: adds DeepSpeed stages 2 and 3")
    parser.add_argument("--json", type=Path, help="write rows, settings and machine to this file")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    console = Console(stderr=True)
    names = ["hf_zero-2", "hf_zero-3", "hf_zero-3-background", "dcp"]
    names += ["deepspeed-2", "deepspeed-3"] if arguments.peer_python else []
    names = arguments.only or names
    size = {key: getattr(arguments, key) for key in ("layers", "width", "heads", "vocab")} | {"length": 64, "batch": 1}
    contenders: list[Ranks] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="checkpoint_benchmark_") as folder:
        try:
            for name in names:
                console.print(f"[dim]building {name}[/dim]")
                contenders.append(start(name, arguments.peer_python if name.startswith("deepspeed") else sys.executable, size))
            measure(contenders, Path(folder), arguments.rounds, console)
        finally:
            for contender in contenders:
                contender.stop()
    table = ResultTable(
        title=f"Checkpoints, {arguments.layers} layers of width {arguments.width}",
        command="python -m benchmarks.checkpoint.checkpoint --rounds {rounds} --layers {layers} --width {width} {whose}".format(
            **vars(arguments), whose=f"--only {' '.join(arguments.only)}" if arguments.only else "--peer-python /path/to/venv/bin/python"
        ),
        text=TEXT.format(**size, rounds=arguments.rounds, world=WORLD),
        columns=["contender", "MiB", *COLUMNS.values(), *TARGETS],
        rows=rows_of(contenders),
    )
    table.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
