"""Time to save, to stall for a save in the background, and to load: hf_zero, torch.distributed.checkpoint, DeepSpeed on one model.

    python benchmarks/checkpoint.py                                    # GPT-2, 24 M parameters, 2 gloo ranks
    python benchmarks/checkpoint.py --peer-python /path/to/venv-with-deepspeed/bin/python
    python benchmarks/checkpoint.py --layers 2 --width 128 --rounds 1  # does it run?

In each round every contender saves, loads, and saves in the background once, in turn; beside them as many bytes are written plainly in
windows of 4 MiB and forced to the disk (the disk's sequential rate), and the shards are copied to memory that is there already. Times are
the slowest rank's; ratios are medians of the rounds' ratios. hf_zero and torch.distributed.checkpoint force their files to the disk,
DeepSpeed does not. Loading reads what is still in the page cache.
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

WORKER = Path(__file__).with_name("checkpoint_worker.py")
REPOSITORY = WORKER.parent.parent
WORLD = 2


@dataclass
class Ranks:
    """The processes of one contender, and the seconds of each kind of request by round."""

    name: str
    processes: list[subprocess.Popen[str]]
    log: Any
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def ask(self, **request: Any) -> float:
        """Has every rank carry out a request; returns the slowest rank's seconds."""
        for process in self.processes:
            process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        taken = max(float(self.answer(process)["seconds"]) for process in self.processes)
        self.seconds.setdefault(request["do"], []).append(taken)
        return taken

    def answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Reads a rank's answer.

        Raises:
            RuntimeError: the rank ended; the message holds what it printed last.
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
    """Starts a contender and waits until its model has taken a step."""
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
        command = [python, str(WORKER), name, json.dumps(size)]
        processes.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True))
    ranks = Ranks(name, processes, log)
    for process in processes:
        ranks.answer(process)
    return ranks


def bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(contenders: list[Ranks], folder: Path, rounds: int, console: Console) -> dict[str, int]:
    """Runs all rounds; returns the bytes of each contender's checkpoint."""
    sizes: dict[str, int] = {}
    for number in range(rounds + 1):  # the first one warms up
        for contender in contenders:
            place = folder / contender.name
            if contender.name.endswith("background"):
                contender.ask(do="copy")
                contender.ask(do="stall", folder=str(place))
                contender.ask(do="rest")
            else:
                contender.ask(do="save", folder=str(place))
                sizes[contender.name] = bytes_below(place)
                contender.ask(do="load", folder=str(place))
                if contender.name == "dcp":
                    contender.ask(do="stall", folder=str(folder / "dcp-background"))
                    contender.ask(do="rest")
                if contender.name.startswith("hf_zero"):
                    contender.ask(do="disk", folder=str(place) + "-plain", nbytes=sizes[contender.name] // WORLD)
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        console.print(f"[dim]round {number} of {rounds}[/dim]")
    for contender in contenders:
        contender.seconds = {kind: taken[1:] for kind, taken in contender.seconds.items()}
    return sizes


COLUMNS = {
    "save": "save s",
    "load": "load s",
    "stall": "stall s",
    "rest": "rest s",
    "copy": "copy s",
    "disk": "disk s",
}


def rows_of(contenders: list[Ranks], sizes: dict[str, int]) -> list[list[str]]:
    """One row per contender: bytes, median seconds, and the ratios that have a target."""
    rows = []
    for contender in contenders:
        seconds = contender.seconds
        size = sizes.get(contender.name)
        row = [contender.name, f"{size / 2**20:.0f}" if size else ""]
        row += [f"{statistics.median(seconds[kind]):.3f}" if kind in seconds else "" for kind in COLUMNS]
        row.append(f"{_ratio(seconds['stall'], seconds['copy']):.2f}" if "copy" in seconds else "")
        row.append(f"{_ratio(seconds['disk'], seconds['save']):.2f}" if "disk" in seconds else "")
        rows.append(row)
    return rows


def _ratio(first: list[float], second: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(first, second, strict=True))


TEXT = """Seconds of the slowest rank, medians of {rounds} rounds; GPT-2 with {layers} layers of width {width} and vocabulary {vocab},
trained in bf16 with fp32 masters and both moments of Adam, {world} gloo ranks. **save** returns when everything is on the disk; **stall**
is how long a save in the background holds training up, **rest** how long it then takes until it is on the disk with nothing else to do;
**load** reads what is still in the page cache. **disk** writes as many bytes in windows of 4 MiB and forces them to the disk; **copy**
copies a rank's masters and moments to memory that is there already. hf_zero and torch.distributed.checkpoint (dcp) force their files to
the disk, DeepSpeed does not."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
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
            sizes = measure(contenders, Path(folder), arguments.rounds, console)
        finally:
            for contender in contenders:
                contender.stop()
    sys.path.append(str(REPOSITORY))  # started by its path
    from benchmarks.tables import ResultTable

    table = ResultTable(
        title="Checkpoints",
        command="python benchmarks/checkpoint.py --peer-python /path/to/venv/bin/python --json benchmarks/results/checkpoint.json",
        text=TEXT.format(**size, rounds=arguments.rounds, world=WORLD),
        columns=["contender", "MiB", *COLUMNS.values(), "stall / copy (target <= 1.20)", "disk / save (target >= 0.90)"],
        rows=rows_of(contenders, sizes),
    )
    table.print()
    if arguments.json:
        table.save(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
