"""Step time and resident memory with and without offload, on CPU ranks: host memory, NVMe at several buffer counts, DeepSpeed.

    python -m benchmarks.offload.offload --nvme /path/on/a/local/disk
    python -m benchmarks.offload.offload --nvme /path --peer-python /path/to/venv/bin/python --json benchmarks/results/offload.json
    python -m benchmarks.offload.offload --nvme /tmp --rounds 1 --layers 2                # quick check

Each contender keeps its processes; a round times each in turn. On a machine without accelerator ``cpu`` moves nothing, and must
therefore cost nothing; ``nvme`` moves masters and moments out of memory, and is compared with the disk's speed alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.processes import REPOSITORY, RUNNER
from benchmarks.common.tables import ResultTable
from benchmarks.offload.offload_disk import seconds_alone

WORKER = Path(__file__).with_name("offload_worker.py")
WORLD = 2
PIPELINED = {"pipeline_read": True, "pipeline_write": True}


@dataclass
class Contender:
    """The processes of one contender and their measurements, one entry per round."""

    name: str
    package: str
    blocks: dict[str, Any]
    stage: int
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    log: Any = None
    answers: list[dict[str, float]] = field(default_factory=list)

    def start(self, python: str, size: dict[str, int]) -> None:
        """Start the ranks and wait until their models are built.

        Raises:
            RuntimeError: A rank ended; the message has the last lines that it printed.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.log = tempfile.TemporaryFile("w+", prefix="offload_")  # noqa: SIM115 - closed by stop
        common = {"WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        common |= {"DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
        for rank in range(WORLD):
            values = {**common, "RANK": rank, "LOCAL_RANK": rank}
            env = {**os.environ, **{key: str(value) for key, value in values.items()}}
            env["PATH"] = os.pathsep.join((str(Path(python).parent), env["PATH"]))  # the peer compiles with its venv's ninja
            env.pop("PYTHONPATH", None)
            if self.package == "hf_zero":
                env["PYTHONPATH"] = str(REPOSITORY)
            command = [python, str(RUNNER), str(WORKER), self.package, str(self.stage), json.dumps(self.blocks), json.dumps(size)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log, "text": True}
            self.processes.append(subprocess.Popen(command, env=env, **pipes))  # type: ignore[call-overload]
        for process in self.processes:
            self._answer(process)

    def ask(self, steps: int) -> dict[str, float]:
        """Run ``steps`` steps on every rank; return the largest of each value over ranks."""
        for process in self.processes:
            process.stdin.write(json.dumps({"steps": steps}) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        answers = [self._answer(process) for process in self.processes]
        return {key: max(answer[key] for answer in answers) for key in answers[0]}

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, float]:
        line = process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"{self.name}: a rank ended with code {process.wait(10)}\n{self.log.read()[-3000:]}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def stop(self) -> None:
        """End the ranks; they remove their swap files."""
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.log is not None:
            self.log.close()

    def median(self, key: str) -> float:
        """Return the median of a value over the rounds."""
        return statistics.median(answer[key] for answer in self.answers)


def contenders(stage: int, nvme: str, peer: bool) -> list[Contender]:
    """Return the contenders of one stage, the baseline first."""

    def file(count: int, **options: Any) -> dict[str, Any]:
        return {"offload_optimizer": {"device": "nvme", "nvme_path": nvme, "buffer_count": count, **options}}

    def overlap(blocks: dict[str, Any], mode: str) -> dict[str, Any]:
        return {**blocks, "hf_zero": {"offload_overlap": mode}}

    cpu = {"offload_optimizer": {"device": "cpu"}}
    if stage == 2:
        ways = {"no offload": {}, "cpu": cpu, "cpu, overlap full": overlap(cpu, "full")}
        ways |= {f"nvme, {count} buffers": file(count) for count in (1, 4)}
        ways |= {f"nvme, {count} buffers, pipelined": file(count, **PIPELINED) for count in (1, 4, 9)}
    else:
        ways = {"no offload": {}, "cpu": cpu, **{f"cpu, overlap {mode}": overlap(cpu, mode) for mode in ("forward", "full")}}
        ways["cpu, overlap full, every step clips"] = {**overlap(cpu, "full"), "gradient_clipping": 1e-3}
        ways["nvme, 4 buffers, pipelined, overlap forward"] = overlap(file(4, **PIPELINED), "forward")
    found = [Contender(f"hf_zero-{stage}, {name}", "hf_zero", blocks, stage) for name, blocks in ways.items()]
    if peer:
        found += [Contender(f"deepspeed-{stage}, {name}", "deepspeed", ways[name], stage) for name in ("no offload", "cpu")]
    return found


def rows_of(running: list[Contender], failed: dict[str, str]) -> list[list[str]]:
    """Return the cells of the table."""
    base, rows = running[0], []
    for one in running:
        ratios = [mine["seconds"] / theirs["seconds"] for mine, theirs in zip(one.answers, base.answers, strict=True)]
        memory = one.median("anonymous")
        rows.append(
            [
                one.name,
                f"{one.median('seconds'):.3f}",
                f"{statistics.median(ratios):.2f}",
                f"{one.median('stepping'):.3f}",
                f"{min(answer['cpu'] for answer in one.answers):.3f}",
                f"{memory / 2**20:.0f}",
                f"{(memory - base.median('anonymous')) / 2**20:+.0f}",
                f"{one.answers[-1]['loss']:.6f}",
            ]
        )
    return rows + [[name, "does not run", "", "", "", "", "", reason] for name, reason in failed.items()]


def run(arguments: argparse.Namespace, stage: int, size: dict[str, int], nvme: str) -> tuple[list[Contender], dict[str, str]]:
    """Measure all contenders that start; return them, and the reason for each other one."""
    running: list[Contender] = []
    failed: dict[str, str] = {}
    try:
        everyone = contenders(stage, nvme, bool(arguments.peer_python))
        for one in [*everyone[:1], *(one for one in everyone[1:] if arguments.only in one.name)]:
            print(f"building {one.name}", file=sys.stderr)
            try:
                one.start(arguments.peer_python if one.package == "deepspeed" else sys.executable, size)
                one.ask(arguments.warmup)
            except RuntimeError as error:
                if one.package == "hf_zero":
                    raise
                print(error, file=sys.stderr)
                failed[one.name] = str(error).strip().splitlines()[-1][:80]
                one.stop()
                continue
            running.append(one)
        for index in range(arguments.rounds):
            shift = index % len(running)
            for one in running[shift:] + running[:shift]:
                one.answers.append(one.ask(arguments.steps))
            shown = "  ".join(f"{one.name}: {one.answers[-1]['seconds']:.3f}" for one in running)
            print(f"round {index + 1}/{arguments.rounds}: {shown}", file=sys.stderr)
    finally:
        for one in running:
            one.stop()
    return running, failed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", required=True, help="folder on a local disk")
    parser.add_argument("--stages", type=int, nargs="+", choices=[2, 3], default=[2, 3])
    for name, value in (("layers", 6), ("width", 512), ("heads", 8), ("vocab", 8192), ("length", 32), ("batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps per contender and round")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--only", default="", help="beside the baseline only contenders whose name contains this")
    parser.add_argument("--peer-python", help="Python of a venv with deepspeed")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    size = {key: getattr(arguments, key) for key in ("layers", "width", "heads", "vocab", "length", "batch")}
    numel = 12 * size["layers"] * size["width"] ** 2 + (size["vocab"] + size["length"]) * size["width"]
    with tempfile.TemporaryDirectory(dir=arguments.nvme, prefix="offload_benchmark_") as nvme:
        alone = [seconds_alone(nvme, 12 * numel // WORLD, WORLD, arguments.rounds)]
        rows = [row for stage in arguments.stages for row in rows_of(*run(arguments, stage, size, nvme))]
        alone.append(seconds_alone(nvme, 12 * numel // WORLD, WORLD, arguments.rounds))
    text = (
        f"GPT-2 shape, {size['layers']} layers, width {size['width']} ({numel / 1e6:.0f} M parameters), bf16, AdamW, no clipping unless "
        f"named, {WORLD} gloo ranks of one thread, batch {size['batch']} x {size['length']}; medians of {arguments.rounds} interleaved "
        f"rounds of {arguments.steps} steps. Masters and moments are {12 * numel / WORLD / 2**20:.0f} MiB per rank. **Ratio**: to the "
        "stage without offload; overlap: `hf_zero.offload_overlap`. **CPU s/step**: a rank's processor time, the least of all rounds. "
        "**Own memory**: a rank's anonymous resident memory between steps. `cpu` moves nothing without an accelerator. The disk alone "
        f"took {alone[0]:.3f} s before and {alone[1]:.3f} s after the rounds for the bytes of `nvme`."
    )
    columns = ["contender", "s/step", "ratio", "of it in step()", "CPU s/step", "own memory MiB", "difference MiB", "loss"]
    command = "python -m benchmarks.offload.offload --nvme /path/on/a/local/disk"
    command += " --peer-python /path/to/venv/bin/python" if arguments.peer_python else ""
    table = ResultTable("Offload on CPU ranks", command, text, columns, rows)
    table.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
