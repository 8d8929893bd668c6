"""Run scripts of the fuzzer on both sides and judge each: equal, refused by name, or a fault.

| verdict | meaning |
|---|---|
| equal | everything shown and compared is the same |
| refused | an error of the package on all ranks, which names the operation's parameter or layer |
| raised | PyTorch raises too |
| SILENT | values differ, or something that must be refused went through |
| UNNAMED | an error on all ranks where the script must be served, or one that does not name the operation's object |
| ONE RANK | an error on one rank, while the other goes on or waits for it |
| HANG | all ranks wait |
| DIED | a process ended |
| ORDER | the ranks issued collectives in orders that could hang on NCCL |
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.errors import CollectiveError, HfZeroError
from tests.parity.fuzzer.engine import Zero
from tests.parity.fuzzer.grammar import Cell, Operation, Script, refusal_words
from tests.parity.fuzzer.model import ScriptError
from tests.parity.fuzzer.plain import MustRefuse, Plain, State
from tests.support import collective_order, ranks
from tests.support.collective_log import recording
from tests.support.processes import PATIENCE

GOOD = ("equal", "refused", "raised")
_CLOSING = (Operation("step"), Operation("save"))  # of a script that has to be refused: at the latest these do it
LOOKS = ("step", "load")  # after these everything is compared, and ranks tell each other how they are
# Relative to the largest element of a tensor, or to 0.01. In 16 bit a step starts from the same masters: one unit in the last place of a
# gradient is what differs.
LIMITS = {"fp32": 2e-5, "bf16": 2e-3}


class Verdict(NamedTuple):
    """Result of a script: a word of the table above, the operation it ended at, and the reason."""

    word: str
    place: int = -1
    text: str = ""

    @property
    def good(self) -> bool:
        return self.word in GOOD


@dataclass
class Status:
    """Result of a script on one rank.

    Attributes:
        differs: First difference from plain PyTorch, with the number of the operation.
        error: Error of the engine's side: its class and text.
        kind: "package", "collective" (a wait that ended), "script" or "other".
        place: Number of the operation that raised.
        plain: Class of PyTorch's error, "refuse" where the package has to refuse, or "".
        plain_place: Number of the operation that PyTorch raised at.
        later: Class and place of an error of PyTorch after an operation that the package has to refuse.
    """

    differs: tuple[int, str] | None = None
    error: str = ""
    kind: str = ""
    place: int = -1
    plain: str = ""
    plain_place: int = -1
    later: tuple[str, int] | None = None

    @property
    def stops(self) -> bool:
        return bool(self.error) or self.differs is not None


# ------------------------------------------------------------------------------------------------ on a rank


class EndOfJob(RuntimeError):
    """Error that ends a job: a script has left waiting ranks or unread messages, so the next one needs new processes."""


def run_scripts(scripts: Sequence[Script], folder: str, timeout: float) -> None:
    """Run scripts one after the other, the same on every rank, and write the verdicts into ``folder``; collective.

    Raises:
        EndOfJob: After the script whose verdict is the last.
    """
    group = dist.new_group(timeout=timedelta(seconds=3 * timeout))
    for number, script in enumerate(scripts):
        verdict, usable = _run_script(script, Path(folder) / str(number), group)
        if ranks.rank() == 0:
            with open(Path(folder) / "verdicts", "a") as progress:
                progress.write(json.dumps(verdict) + "\n")
        if not usable:
            raise EndOfJob(verdict)


def _run_script(script: Script, folder: Path, group: Any) -> tuple[Verdict, bool]:
    """Return the verdict, and whether these processes can run further scripts."""
    status, sides = Status(), []
    with recording() as record:
        try:
            everyone = _play(script, folder, group, status, sides)
        except BaseException as error:  # of the comparison itself
            status.error, status.kind = f"{type(error).__name__}: {error}", "script"
            everyone = _gathered(status, group)
    for side in sides:
        with suppress(Exception):
            side.close()
    gc.collect()
    verdict = judge(script, everyone)
    if verdict.word in ("ONE RANK", "HANG") or script.cell.ranks == 1:
        return verdict, script.cell.ranks == 1
    order = _check_order(record, group)
    return order if order and verdict.good else verdict, order is None


def _play(script: Script, folder: Path, group: Any, status: Status, sides: list[Any]) -> list[Status]:
    torch.manual_seed(0)
    plain = Plain(script.cell, ranks.rank())
    zero = _attempt(status, -1, lambda: Zero(script.cell, ranks.rank(), folder))
    sides.append(zero)
    for place, operation in enumerate(script.operations):
        if not status.error:
            _perform(plain, zero, operation, place, status)
        looks = operation.name in LOOKS and script.cell.looks == "step" or bool(plain.candidates)
        if looks and not status.error:
            _attempt(status, place, partial(_look, plain, zero, place, status, group))
        if status.error or operation.name in LOOKS:
            everyone = _gathered(status, group)
            if any(one.stops for one in everyone):
                return everyone
    last = len(script.operations)
    for operation in _CLOSING if status.plain == "refuse" else ():
        if not status.error:
            _perform(plain, zero, operation, last, status)
    if not status.error:
        _attempt(status, last, partial(_look, plain, zero, last, status, group, moments=True))
    return _gathered(status, group)


def _perform(plain: Plain, zero: Zero, operation: Operation, place: int, status: Status) -> None:
    expected: dict[str, Any] = {}
    if not status.plain:
        try:
            expected = getattr(plain, operation.name)(**dict(operation.args))
        except MustRefuse:
            status.plain, status.plain_place = "refuse", place
        except Exception as error:
            status.plain, status.plain_place = type(error).__name__, place
    elif status.plain == "refuse" and status.later is None:  # a rank alone may have done it, and nobody has seen it yet
        try:
            getattr(plain, operation.name)(**dict(operation.args))
        except MustRefuse:
            pass
        except Exception as error:
            status.later = type(error).__name__, place
    seen = _attempt(status, place, partial(getattr(zero, operation.name), **dict(operation.args)))
    if not status.plain and not status.error:
        _compare(seen, expected, plain.cell, status, place)


def _attempt(status: Status, place: int, call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        status.place, status.error = place, f"{type(error).__name__}: {error}"
        package = "package" if isinstance(error, HfZeroError) else "script" if isinstance(error, (AssertionError, ScriptError)) else "other"
        waited = isinstance(error, CollectiveError) or any(words in str(error) for words in ("imed out", "timeout of the process group"))
        status.kind = "collective" if waited else package
        return None


def _look(plain: Plain, zero: Zero, place: int, status: Status, group: Any, moments: bool = False) -> None:
    """Compare everything; collective."""
    if status.plain:
        return
    weights, masters, buffers = zero.weights(), zero.masters(), zero.buffers()
    if not plain.candidates:
        plain.adopt()
    states, plain.candidates = plain.candidates or [plain.state()], []
    # Several choices of a step may fit the weights.
    found = {key: zero.moments(key) for key in ("exp_avg", "exp_avg_sq")} if moments or len(states) > 1 else {}
    differences = []
    for state in states:
        plain.restore(state)
        differences.append(_difference(state, plain, zero, weights, masters, buffers) or _moments_difference(plain, zero, found))
    fits = [not text for text in differences]
    if len(states) > 1 and plain.cell.stages > 1:  # each stage has seen its own layers alone
        fits = [all(column) for column in zip(*_gathered(fits, group), strict=True)]
    plain.restore(states[fits.index(True) if True in fits else 0])
    if True not in fits:
        _differs(status, place, next(filter(None, differences), "stages fit different results"))
        return
    if plain.cell.dtype != "fp32":
        plain.follow({name: value for name, value in masters.items() if dict(plain.model.named_parameters())[name].requires_grad})


def _difference(state: State, plain: Plain, zero: Zero, weights: Any, masters: Any, buffers: Any) -> str:
    cell = plain.cell
    # [Note: sums of pieces] Where a layer is recomputed in pieces a parameter gets several gradients in a backward. autograd rounds
    # their sum to 16 bit after each; the package adds them in fp32 at stage 0, and where they come late. Where pieces cancel out that is
    # more than a unit in the last place: half of that of gradients up to 0.5, times 20 in a first update with eps 1e-3.
    loose = 10 if cell.recompute == "pieces" and cell.dtype != "fp32" else 1
    found = _worst(weights, state.weights, cell.dtype, "weight", everywhere=cell.stages == 1, loose=loose)
    trains = {name for name, parameter in zero.model.named_parameters() if parameter.requires_grad}
    found = found or _worst({k: v for k, v in masters.items() if k in trains}, state.masters, cell.dtype, "master", loose=loose)
    found = found or _worst(buffers, state.buffers[plain.place], cell.dtype, "buffer", everywhere=True)
    if not found and zero.engine.global_steps != state.steps:
        found = f"{zero.engine.global_steps} steps, expected {state.steps}"
    norm = zero.engine.get_global_grad_norm()
    if not found and state.norm is not None and (norm is None or abs(norm - state.norm) > 1e-2 * state.norm):
        found = f"norm {norm}, expected {state.norm}"
    return found


def _moments_difference(plain: Plain, zero: Zero, moments: dict[str, dict[str, Tensor]]) -> str:
    """Return the largest difference of the optimizer's states by kind, "" if there is none."""
    expected = plain.state().moments
    trains = {name for name, parameter in zero.model.named_parameters() if parameter.requires_grad}
    for key, values in moments.items():
        found = {name: value for name, value in values.items() if name in trains and name in expected}
        wanted = {name: state[key] for name, state in expected.items() if name in trains}
        missing = wanted.keys() - found.keys() if plain.cell.stages == 1 else set[str]()  # on other stages
        text = f"no {key} of {min(missing)}" if missing else _worst(found, wanted, plain.cell.dtype, key, loose=20)
        if text:
            return text
    return ""


def _compare(seen: dict[str, Any], expected: dict[str, Any], cell: Cell, status: Status, place: int) -> None:
    dtype = cell.dtype
    if "tokens" in seen and not torch.equal(seen["tokens"], expected["tokens"]) and dtype != "fp32":
        seen, expected = ({"logits 0": side["logits 0"]} for side in (seen, expected))  # a tie that rounding decided
    everywhere = bool(seen) or cell.stages == 1  # another stage has the parameter
    text = _worst(seen, expected, dtype, "value", everywhere=everywhere, loose=1 if dtype == "fp32" else 10)
    if text:
        _differs(status, place, text)


def _differs(status: Status, place: int, text: str) -> None:
    if status.differs is None:
        status.differs = (place, text)


def _worst(found: dict[str, Tensor], wanted: dict[str, Tensor], dtype: str, what: str, everywhere: bool = False, loose: float = 1) -> str:
    """Return the largest difference as text, "" if all are within the limit."""
    if everywhere and found.keys() != wanted.keys():
        return f"{what}s of other names: {sorted(found.keys() ^ wanted.keys())}"
    worst = (0.0, "")
    for name in found.keys() & wanted.keys():
        mine, theirs = found[name].detach(), wanted[name].detach()
        if mine.shape != theirs.shape:
            return f"{what} {name} has shape {tuple(mine.shape)}, expected {tuple(theirs.shape)}"
        if what in ("weight", "buffer") and mine.dtype != theirs.dtype:
            return f"{what} {name} is {mine.dtype}, expected {theirs.dtype}"
        # A 16-bit copy of masters that agree may be rounded the other way.
        limit = loose * (2**-7 if what == "weight" and mine.dtype == torch.bfloat16 else LIMITS[dtype])
        by = ((mine.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp(min=0.01)).item() if mine.numel() else 0.0
        by = by if by == by else float("inf")
        if by > limit and by > worst[0]:
            worst = (by, f"{what} {name} differs by {by:.1e}")
    return worst[1]


def _gathered(value: Any, group: Any) -> list[Any]:
    everyone: list[Any] = [None] * ranks.world()
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def _check_order(record: collective_order.Record, group: Any) -> Verdict | None:
    records: list[Any] = [None] * ranks.world()
    dist.all_gather_object(records, record, group=group)
    try:
        collective_order.check(records)
    except collective_order.OrderError as error:
        return Verdict("ORDER", -1, str(error))
    return None


# ------------------------------------------------------------------------------------------------ judgement


def judge(script: Script, everyone: Sequence[Status]) -> Verdict:
    """Return the verdict on a script from its results on all ranks."""
    failed = [one for one in everyone if one.error]
    waited = [one for one in failed if one.kind == "collective"]
    differs = min((one.differs for one in everyone if one.differs is not None), default=None)
    if differs is not None and differs[0] <= min((one.place for one in failed), default=len(script.operations)):
        return Verdict("SILENT", *differs)
    if waited and len(waited) == len(everyone):
        return Verdict("HANG", waited[0].place, waited[0].error)
    if failed and (waited or len(failed) < len(everyone)):
        one = next((one for one in failed if one.kind != "collective"), failed[0])
        return Verdict("ONE RANK", one.place, f"rank {everyone.index(one)}: {one.error}")
    plain = everyone[0]
    if not failed:
        text = "nothing refused it" if plain.plain == "refuse" else f"PyTorch raises {plain.plain}"
        return Verdict("SILENT", plain.plain_place, text) if plain.plain else Verdict("equal")
    return _judge_error(script, everyone)


def _judge_error(script: Script, everyone: Sequence[Status]) -> Verdict:
    """Return the verdict if all ranks raised."""
    first = everyone[0]
    if first.plain and first.plain != "refuse" and first.place == first.plain_place:
        fits = all(one.kind == "package" or one.error.startswith(first.plain) for one in everyone)
        return Verdict("raised" if fits else "UNNAMED", first.place, first.error)
    if first.later is not None and all((one.error.split(":")[0], one.place) == first.later for one in everyone):
        return Verdict("raised", first.place, first.error)
    allowed = [operation for operation in script.operations[: first.place + 1] if _may_refuse(operation, everyone)]
    return Verdict("refused" if allowed else "UNNAMED", first.place, first.error)


def _may_refuse(operation: Operation, everyone: Sequence[Status]) -> bool:
    words = refusal_words(operation)
    return words is not None and all(one.kind == "package" and any(word in one.error for word in words) for one in everyone)


# ------------------------------------------------------------------------------------------------ in pytest's process


def verdicts_of(scripts: Sequence[Script], batch: int = 50, timeout: float = 60.0 * PATIENCE) -> list[Verdict]:
    """Return the verdict on each script. Scripts of one number of ranks share jobs of ``batch``; after a hang the others need a new job.

    Args:
        scripts: Scripts in any order.
        batch: Number of scripts in a job.
        timeout: Seconds after which a collective that waits counts as a hang.
    """
    found: dict[int, Verdict] = {}
    for world in sorted({script.cell.ranks for script in scripts}):
        waiting = [number for number, script in enumerate(scripts) if script.cell.ranks == world]
        while waiting:
            part = waiting[:batch]
            results = _run_job([scripts[number] for number in part], world, timeout)
            found.update(zip(part, results, strict=False))
            waiting = waiting[len(results) :]
    return [found[number] for number in range(len(scripts))]


def _run_job(scripts: Sequence[Script], world: int, timeout: float) -> list[Verdict]:
    """Return the verdicts of the first scripts, at least one."""
    with tempfile.TemporaryDirectory(prefix="hf_zero_scripts_") as folder:
        limit = 4 * timeout + 2 * len(scripts) + 60
        # Each script's collectives are checked by themselves, so that one which is out of order does not hide the others.
        outcomes = ranks.observe_ranks(
            run_scripts, world, list(scripts), folder, timeout, timeout=limit, group_timeout=timeout, ordered=False
        )
        progress = Path(folder) / "verdicts"
        lines = progress.read_text().splitlines() if progress.exists() else []
        found = [Verdict(*json.loads(line)) for line in lines]
    worst = next((outcome for outcome in outcomes if not outcome.ok and "EndOfJob" not in outcome.text), None)
    if worst is not None or not found:
        found.append(Verdict("HANG" if worst and worst.status == "hung" else "DIED", -1, worst.text if worst else ""))
    return found
