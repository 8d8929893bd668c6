"""Time from the death of a rank to the step at which it died, from a snapshot in host memory and from the disk; cost of snapshots.

    python -m benchmarks.checkpoint.recovery                                    # GPT-2, 70 M parameters, 2 gloo ranks
    python -m benchmarks.checkpoint.recovery --layers 2 --width 128 --save-every 16  # quick check

torchrun starts two ranks again after rank 1 was killed (SIGKILL). The run with snapshots takes one every ``--every`` steps, the other one
saves every ``--save-every`` steps to ``--folder``. Both die half an interval after their last snapshot (the ``--snapshots``th) or
checkpoint. A step's seconds are the median of the steps without a snapshot; a snapshot's stall is the median of the calls that took one,
without the first two, which take memory that later ones use again; its CPU time is the main thread's in these calls. What the thread behind
it costs is the median of the steps that it ran beside, against the others. Times are rank 0's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.processes import REPOSITORY
from benchmarks.common.tables import ResultTable

WORKER = "benchmarks.checkpoint.recovery_worker"


def run(options: argparse.Namespace, snapshots: bool, folder: Path) -> dict[str, Any]:
    """Run two ranks through one death; return the report of rank 0."""
    plan = {**vars(options), "snapshots": options.snapshots if snapshots else 0, "folder": str(folder)}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "1", "-m", WORKER]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*words, json.dumps(plan)], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def row(name: str, found: dict[str, Any]) -> list[str]:
    """Return a row of the table of recoveries."""
    lost = found["died_at"] - found["began"]
    again = lost * found["step"]
    parts = [found["started"] - found["died"], found["built"] - found["started"], found["loaded"] - found["built"], again]
    return [name, *(f"{part:.1f} s" for part in parts), f"{lost}", f"{sum(parts):.1f} s"]


def cost(found: dict[str, Any]) -> list[str]:
    """Return the row of what a snapshot costs."""
    stall, step, beside = statistics.median(found["stalls"][2:]), found["step"], statistics.median(found["beside"])
    of_all = (stall + max(0.0, beside - step)) / (found["every"] * step)
    return [
        f"{step:.3f} s",
        f"{stall:.3f} s ({min(found['stalls'][2:]):.3f} to {max(found['stalls'][2:]):.3f})",
        f"{statistics.median(found['cpu'][2:]):.3f} s",
        f"{beside:.3f} s",
        f"{found['nbytes'] / 1e6:.0f} MB",
        f"{of_all:.1%} of {found['every']} steps",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--every", type=int, default=8, help="steps between two snapshots")
    parser.add_argument("--snapshots", type=int, default=6, help="snapshots before the death, at least 3")
    parser.add_argument("--save-every", type=int, default=40, help="steps between two checkpoints on disk")
    parser.add_argument("--folder", default=None, help="a folder on the disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name in ("snapshot", "disk"):
            Path(folder, name).mkdir()
        snapshot, disk = run(options, True, Path(folder, "snapshot")), run(options, False, Path(folder, "disk"))
    columns = ["going on from", "launcher", "imports and engine", "load", "steps again", "steps lost", "together"]
    ResultTable("Recovery", " ".join(sys.argv), "", columns, [row("a snapshot", snapshot), row("the disk", disk)]).print()
    columns = ["step", "stall", "CPU in it", "step beside the thread", "bytes of a rank", "cost"]
    ResultTable("Cost of a snapshot", " ".join(sys.argv), "", columns, [cost(snapshot)]).print()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
