"""Explain an out-of-memory error: list what was allocated, and which change of the configuration would have saved how many bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_zero import observe
from hf_zero.config.resolve import ResolvedConfig
from hf_zero.core.holdings import KINDS, Holding, alive, bytes_by_kind, taken
from hf_zero.system.sizes import gib

_ASKED = re.compile(r"(?:tried to allocate|allocating) (\d+(?:\.\d+)?) ?(\w+)|(\d+) bytes asked for", re.IGNORECASE)
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_WORTH = 0.01  # share of the memory of the engine and its model; smaller savings are not listed
_FIRST_WORDS = "hf_zero: memory in use on rank"
_REST = "activations"  # and other allocations since the engine was made


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` is an out-of-memory error of a device or the host: of torch, Python, or torch's allocator of host memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


@dataclass(frozen=True)
class Saving:
    """A change of the configuration that saves memory.

    Attributes:
        change: Text to write into the configuration.
        nbytes: Bytes that it saves on this rank in the memory that ran out.
        how: Explanation of the number.
    """

    change: str
    nbytes: int
    how: str


@dataclass(frozen=True)
class Failure:
    """Memory of a rank when an allocation failed.

    Attributes:
        tier: The memory that ran out: "device" or "host".
        phase: "forward", "backward" or "step".
        books: Bytes by tier and kind of tensor.
        asked: Bytes of the failed allocation; 0 if the error does not give them.
    """

    tier: str
    phase: str
    books: Counter[tuple[str, str]] = field(default_factory=Counter)
    asked: int = 0

    def here(self, *kinds: str) -> int:
        """Return the bytes of ``kinds`` in the memory that ran out."""
        return sum(self.books[self.tier, kind] for kind in kinds)


class OutOfMemory:
    """An explainer of out-of-memory errors: it adds to the error which tensors existed, and which changes would have saved memory.

    Nothing is counted before an error. The numbers are those at the time of the error. The engine's tensors are counted exactly, by the
    same function that plans use. The memory beyond them, and beyond the memory that was in use before the engine was made (the interpreter,
    other models), is reported as activations.

    Args:
        resolved: The configuration.
        held: Holdings of the new engine.
        device: Device of the training.
    """

    def __init__(self, resolved: ResolvedConfig, held: Iterable[Holding], device: torch.device) -> None:
        self._resolved = resolved
        self._others = _beyond(bytes_by_kind(held), device)

    def explain(self, engine: Any, error: BaseException, phase: str) -> None:
        """Add the explanation to the message of ``error``, if it is an out-of-memory error without one; never raises.

        The class of the error stays, its text stays in front, and it keeps a single argument, so that a search for "out of memory" finds
        it.
        """
        if not is_out_of_memory(error) or _FIRST_WORDS in str(error):
            return
        try:
            explanation = "\n".join(self._lines(engine, error, phase))
        except Exception as fault:  # a failing explanation must not hide the error itself
            explanation = f"{_FIRST_WORDS} {observe.global_rank()} cannot be listed: {type(fault).__name__}: {fault}"
        text, *more = error.args or ("",)
        error.args = (f"{text}\n{explanation}".lstrip("\n"), *more)

    def _lines(self, engine: Any, error: BaseException, phase: str) -> Iterator[str]:
        failure = failure_of(engine, error, phase, self._others)
        parts = [f"{kind} {gib(failure.here(kind))}" for kind in KINDS if failure.here(kind)]
        last = _last_block(engine)
        moment = f"{phase} (last block: {last})" if last and phase != "step" else phase
        yield f"{_FIRST_WORDS} {observe.global_rank()} in {moment}, on the {failure.tier}: {', '.join(parts) or 'nothing'}"
        found = sorted(savings(engine, self._resolved, failure), key=lambda saving: -saving.nbytes)
        least = _WORTH * (failure.here(*KINDS) - failure.here("other"))
        worth = [saving for saving in found if saving.nbytes > least]
        if not worth:
            yield "No change of the configuration would save at least 1 % of that: use a smaller model, or a device with more memory"
            return
        asked = f" (the failed allocation needed {gib(failure.asked)})" if failure.asked else ""
        yield f"On this rank, each of these changes would have saved memory{asked}:"
        for saving in worth:
            yield f"- {saving.change}: {gib(saving.nbytes)} ({saving.how})"


def failure_of(engine: Any, error: BaseException, phase: str, others: Mapping[str, int]) -> Failure:
    """Return this rank's memory after ``error``, with activations; ``others``: bytes by tier in use before the engine was made."""
    device = engine.collectives.topology.device
    of_host = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    tier = "host" if of_host or device.type == "cpu" else "device"
    books = alive(engine)
    beyond = _beyond(books, device)[tier]
    other = min(beyond, others.get(tier, 0))
    books[tier, "other"] += other
    books[tier, _REST] += beyond - other
    return Failure(tier, phase, books, _asked(str(error)))


def _beyond(books: Counter[tuple[str, str]], device: torch.device) -> dict[str, int]:
    """Return the bytes by tier that are allocated but belong to no entry of ``books``."""
    places = {"host": torch.device("cpu")} | ({"device": device} if device.type != "cpu" else {})
    known = {tier: sum(nbytes for (other, _), nbytes in books.items() if other == tier) for tier in places}
    return {tier: max(0, taken(place) - known[tier]) for tier, place in places.items()}


def _asked(text: str) -> int:
    found = _ASKED.search(text)
    if found is None:
        return 0
    return int(found[3]) if found[3] else int(float(found[1]) * _UNITS.get(found[2], 0))


def _last_block(engine: Any) -> str:
    """Return the name of the block that forward or backward entered last; "" if it is unknown."""
    names = {block.name for block in engine.runtime.blocks}
    for label in reversed(observe.recent_labels()):
        phase, _, name = label.removeprefix("hf_zero::").partition(" (")
        if phase in ("pre_forward", "pre_backward", "recompute") and name[:-1] in names:
            return name[:-1]
    return ""


# -- possible savings ---------------------------------------------------------------------------------------------------


def savings(engine: Any, resolved: ResolvedConfig, failure: Failure) -> Iterator[Saving]:
    """Yield changes of the configuration that save memory in the tier that ran out.

    Args:
        engine: The engine.
        resolved: Its configuration.
        failure: Its memory when the allocation failed.
    """
    yield from _by_stage(engine, failure)
    yield from _by_ranks(engine, failure)
    yield from _by_offload(engine, resolved, failure)
    yield from _by_limits(engine, failure)
    if failure.phase != "step":
        yield from _by_micro_batch(resolved, failure)
        yield from _by_recomputation(engine, failure)


def _by_stage(engine: Any, failure: Failure) -> Iterator[Saving]:
    policy, world = engine.stage_policy, engine.collectives.data.world
    states = failure.here("masters", "moments") + _summed_gradients(engine, failure)
    at_one = 0 if policy.optimizer_sharded or world == 1 else states - states // world
    if at_one:
        yield Saving("zero_optimization.stage: 1", at_one, f"masters, moments and gradients are shared out over {world} ranks")
    if policy.parameters_sharded or world == 1:
        return
    whole = failure.here("parameters")
    live = min(whole, most_gathered(engine))
    saved = at_one + whole - whole // world - live
    how = f"parameters too: {gib(whole)} become {gib(whole // world)}, and at most about {gib(live)} are gathered at a time"
    yield Saving("zero_optimization.stage: 3", saved, how)


def most_gathered(engine: Any) -> int:
    """Return the largest number of bytes that stage 3 unshards at a time with little prefetching: the root, and two consecutive blocks."""
    sizes = [sum(unit.whole.nbytes for unit in block.units) for block in engine.runtime.blocks]
    pairs = [first + second for first, second in zip(sizes, [*sizes[1:], 0], strict=True)]
    return sum(unit.whole.nbytes for unit in engine.runtime.root.units) + max(pairs, default=0)


def _summed_gradients(engine: Any, failure: Failure) -> int:
    """Return the bytes of gradients that stay in memory until the step; other gradients are temporary."""
    entries = engine.stepper.reducer.gradients if engine.stepper is not None else ()
    held = [entry.shard for entry in entries if entry.shard is not None]
    if not engine.stage_policy.optimizer_sharded:
        held = [tensor for entry in entries for tensor in entry.tensors()]
    seen = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held if _tier(tensor) == failure.tier}
    return sum(seen.values())


def _tier(tensor: torch.Tensor) -> str:
    return "host" if tensor.device.type == "cpu" else "device"


def _resting_shards(engine: Any, failure: Failure) -> int:
    shards = [unit.own.resting()[0] for unit in engine.units if unit.reshards and not unit.shard_storage.on_disk]
    return sum(shard.nbytes for shard in shards if _tier(shard) == failure.tier)


def _by_ranks(engine: Any, failure: Failure) -> Iterator[Saving]:
    policy = engine.stage_policy
    if not policy.optimizer_sharded:
        return
    shared = failure.here("masters", "moments") + _summed_gradients(engine, failure)
    if policy.parameters_sharded:
        shared += _resting_shards(engine, failure)
    if shared:
        yield Saving("twice as many ranks", shared - shared // 2, "each holds half as much of the sharded state")


def _by_offload(engine: Any, resolved: ResolvedConfig, failure: Failure) -> Iterator[Saving]:
    zero, policy = resolved.config.zero_optimization, engine.stage_policy
    target, of_device = ("cpu", True) if failure.tier == "device" else ("nvme", False)
    states = failure.here("masters", "moments")
    if of_device:
        states += _summed_gradients(engine, failure)
    if zero.offload_optimizer.device != target and states:
        stage = "" if policy.optimizer_sharded else " with zero_optimization.stage: 1"
        moved = "masters, moments and gradients" if of_device else "masters and moments"
        yield Saving(f"zero_optimization.offload_optimizer.device: {target}{stage}", states, f"{moved} {_goes(target)}")
    resting = _resting_shards(engine, failure)
    if policy.parameters_sharded and zero.offload_param.device != target and resting:
        yield Saving(f"zero_optimization.offload_param.device: {target}", resting, f"shards of parameters {_goes(target)}")


def _goes(target: str) -> str:
    return "go to host memory" if target == "cpu" else "go to files below nvme_path"


def _by_limits(engine: Any, failure: Failure) -> Iterator[Saving]:
    """Yield savings from lower limits of stage 3: gathered bytes beyond the necessary minimum."""
    if not engine.stage_policy.parameters_sharded:
        return
    largest = max((sum(unit.whole.nbytes for unit in block.units) for block in engine.runtime.blocks), default=0)
    needed = sum(unit.whole.nbytes for unit in engine.runtime.root.units) + largest
    now = failure.here("gathered")
    if now > needed:
        change = "zero_optimization.stage3_prefetch_bucket_size: 0 and stage3_max_reuse_distance: 0"
        yield Saving(
            change,
            now - needed,
            f"{gib(now)} were gathered, {gib(needed)} are needed for the largest block and the parameters outside blocks",
        )


def _by_micro_batch(resolved: ResolvedConfig, failure: Failure) -> Iterator[Saving]:
    micro, accumulation = resolved.batch.micro, resolved.batch.accumulation
    if micro < 2:
        return
    smaller = max(part for part in range(1, micro) if micro % part == 0)
    saved = failure.here(_REST) * (micro - smaller) // micro
    change = f"train_micro_batch_size_per_gpu: {smaller} with gradient_accumulation_steps: {accumulation * micro // smaller}"
    yield Saving(change, saved, f"activations of {smaller} of {micro} samples at a time; the same numbers")


def _by_recomputation(engine: Any, failure: Failure) -> Iterator[Saving]:
    if recomputes(engine):
        return
    names = [block.name for block in engine.runtime.blocks]
    begun = len(names)
    if failure.phase == "forward":  # later blocks have saved nothing yet
        last = _last_block(engine)
        begun = names.index(last) + 1 if last in names else begun
    if begun > 1:
        rest = failure.here(_REST)
        how = f"at most: activations of one of {begun} blocks at a time; their inputs stay"
        yield Saving("model.gradient_checkpointing_enable()", rest - rest // begun, how)


def recomputes(engine: Any) -> bool:
    """Return whether activations are already recomputed in backward."""
    modules = engine.module.modules()
    return any(getattr(module, "gradient_checkpointing", False) is True for module in modules) or any(
        block.checkpointed for block in engine.runtime.blocks
    )
