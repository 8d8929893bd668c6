"""Configuration files drawn at random, and one script under DeepSpeed and under hf_zero, which must see and save the same values.

By hand, with the Python of a venv that has DeepSpeed: ``python -m tests.config.drawn_files --count 30 --seed 1 --peer VENV/bin/python``,
``--run "{...}"`` for one that was printed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.config.drawn_file_options import Case, changed, draw, full

ROOT = Path(__file__).parents[2]
VALUES = ("loss", "norm", "eval")
# The scale of the present step, not that of the file; types and defaults that change no number.
WANTED_GETTERS = (
    "loss_scale", "dynamic_loss_scale", "autotp_size", "zero_overlap_comm", "zero_gather_16bit_weights_on_model_save",
    "get_data_types",
)  # fmt: skip
WORKER = Path(__file__).parent / "drawn_files_worker.py"


def outcomes(cases: dict[str, Case], python: str, folder: Path, **variables: str) -> dict[str, list[Any]]:
    """Run all cases under one library; return for each what its ranks wrote: a result, an error, or None where a rank hung or died."""
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_ZERO", "PYTHONPATH")} | variables
    subprocess.run([python, str(WORKER), str(folder / "cases.json"), str(folder)], env=environment, check=True, cwd=folder)
    found: dict[str, list[Any]] = {}
    for name, case in cases.items():
        paths = [folder / f"{name}.{rank}.json" for rank in range(case["world"])]
        found[name] = [json.loads(path.read_text()) if path.exists() else None for path in paths]
    return found


def differences(left: Any, right: Any, share: float, where: str = "") -> Iterator[str]:
    """Yield where two results differ by more than ``share`` of the value."""
    if left == right or differs_on_purpose(left, right, re.sub(r"\[\d+\]", "", where)):
        return
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            if key not in left or key not in right:
                if not (key not in left and where.endswith(".files") or key == "warmup_max_lr" or "elapsed" in key):
                    yield f"{where}.{key}: only {'DeepSpeed' if key in left else 'hf_zero'}"
                continue
            yield from differences(left[key], right[key], share, f"{where}.{key}")
    elif isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            yield f"{where}: {len(left)} and {len(right)} entries"
        for index, pair in enumerate(zip(left, right, strict=False)):
            yield from differences(*pair, share, f"{where}[{index}]")
    elif isinstance(left, (int, float)) and isinstance(right, (int, float)) and not isinstance(left, bool):
        if (
            left != right
            and not (math.isnan(left) and math.isnan(right))
            and not abs(left - right) <= share * max(abs(left), abs(right)) + share * 1e-3
        ):
            yield f"{where}: {left} and {right}"
    elif left != right:
        yield f"{where}: {left!r} and {right!r}"


def differs_on_purpose(peer: Any, our: Any, place: str) -> bool:
    """Return whether a difference is one of those that are known and wanted."""
    name = place.split(".")[-1]
    return (
        (isinstance(peer, str) and peer.startswith("raises "))  # hf_zero answers at every stage and precision
        or (name == "norm" and peer is None)  # DeepSpeed computes none without clipping at stage 0
        or name == "micro_steps"  # DeepSpeed counts calls of step(), and from 0 after a load
        or place.startswith(".first.")
        and name in WANTED_GETTERS
        or "elapsed" in place  # times
        or place == ".first.optimizer_name"
        and peer == "function"
        or (name == "mom" and peer == 0.0)  # DeepSpeed knows SGD's and RMSprop's momentum alone
    )


def grows(result: Any) -> bool:
    scales = [row["loss_scale"] for row in result["seen"] if isinstance(row["loss_scale"], float)]
    return any(later > earlier for earlier, later in zip(scales, scales[1:], strict=False))


def compared(case: Case, peer: Any, our: Any, share: float) -> Iterator[str]:
    """Yield the differences of two results of one rank; a tensor is compared by its largest element, in which rounding shows least."""
    # docs/migrate-from-deepspeed.md: DeepSpeed's update is half as large where the scale grows, and Muon's norm is another one.
    halved, config = grows(peer), case["config"]
    if case["load"].get("load_optimizer_states") is False:  # hf_zero's schedulers write the rate of the step that was loaded
        return
    ignored = VALUES if halved else ("norm",) if config.get("optimizer", {}).get("type") == "Muon" else ()
    if case["loop"] == "no_sync" or config.get("managed_gradient_accumulation") is False:
        ignored += ("boundary",)  # the script decides here; DeepSpeed answers by its count, or False outside of step()
    left, right = (
        {**side, "weights": None, "seen": [{name: value for name, value in row.items() if name not in ignored} for row in side["seen"]]}
        for side in (peer, our)
    )
    yield from differences(left, right, share)
    if halved:
        return
    for name, values in peer["weights"].items():
        one, other = flat(values), flat(our["weights"][name])
        off = max(abs(a - b) for a, b in zip(one, other, strict=True))
        if not off <= 10 * share * max(map(abs, one)) and any(map(math.isfinite, (*one, *other))):
            yield f".weights.{name}: off by {off:.3g} of {max(map(abs, one)):.3g}"


def flat(values: Any) -> list[float]:
    return [element for value in values for element in flat(value)] if isinstance(values, list) else [values]


def grouped(lines: list[str]) -> list[str]:
    """Return the first line of each place, with the number of steps in which it differs."""
    places: dict[str, list[str]] = {}
    for line in lines:
        places.setdefault(re.sub(r"\d+", "#", line.split(":")[0]), []).append(line)
    return [f"{found[0]}{f' (and {len(found) - 1} more)' if len(found) > 1 else ''}" for found in places.values()]


def share_of(case: Case) -> float:
    config = case["config"]
    if config.get("fp16", {}).get("enabled") or config.get("bf16", {}).get("enabled") or "torch_autocast" in config:
        return 6e-2
    if config.get("optimizer", {}).get("type") == "Lion":  # the sign of a gradient near 0 is noise
        return 1e-2
    return 6e-2 if "16" in str(config.get("communication_data_type")) + str(config.get("data_types")) else 2e-4


def judged(case: Case, peers: list[Any], ours: list[Any]) -> list[str]:
    """Return the word of the comparison, then its differences."""
    kinds = [["hangs" if one is None else "raises" if "error" in one else "runs" for one in side] for side in (peers, ours)]
    lines = []
    for side, name, found in ((peers, "DeepSpeed", kinds[0]), (ours, "hf_zero", kinds[1])):
        for rank, one in enumerate(side):
            if found[rank] == "raises" and (rank == 0 or len(set(found)) > 1):
                lines.append(f"{name} {rank}: {one['error'][:400]} {one['where']}")
        if "hangs" in found:
            lines.append(f"{name}: {found}")
    if set(kinds[0]) == set(kinds[1]) == {"runs"}:
        found = [line for pair in zip(peers, ours, strict=True) for line in compared(case, *pair, share_of(case))]
        return ["DIFFERS" if found else "ok", *grouped(found)]
    if set(kinds[1]) != {"raises"} and set(kinds[1]) != {"runs"}:
        return ["LOST", *lines]
    return [{("raises", "raises"): "both raise", ("runs", "raises"): "REFUSED"}.get((kinds[0][0], kinds[1][0]), "more"), *lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peer", required=True, help="Python of a venv that has DeepSpeed")
    parser.add_argument("--run", help="options of one case, as they were printed")
    parser.add_argument("--keep", type=Path, help="folder for the results and logs of all ranks")
    parser.add_argument("--lines", type=int, default=8, help="differences printed for each case")
    given = parser.parse_args()
    random_ = random.Random(given.seed)
    drawn = [full(eval(given.run, {"inf": math.inf}))] if given.run else [draw(random_) for _ in range(given.count)]  # noqa: S307
    cases = {str(index): case for index, case in enumerate(drawn)}
    with tempfile.TemporaryDirectory() as name:
        folder = given.keep or Path(name)
        folder.mkdir(exist_ok=True, parents=True)
        ours = outcomes(cases, sys.executable, folder / "hf_zero", HF_ZERO="1", PYTHONPATH=str(ROOT))
        peers = outcomes(cases, given.peer, folder / "deepspeed", DS_ACCELERATOR="cpu")
    for index, case in cases.items():
        word, *lines = judged(case, peers[index], ours[index])
        print(f"[{index}] {word} {changed(case)}")
        for line in lines[: given.lines]:
            print(f"      {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
