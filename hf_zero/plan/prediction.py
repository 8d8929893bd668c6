"""What the books of one step say: the peak of each tier, what is alive then, what is sent, how long it takes, and whether it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_zero.core.holdings import KINDS, TIERS
from hf_zero.plan.books import Change, Storage
from hf_zero.plan.cluster import Cluster, Hardware
from hf_zero.plan.run import Observation
from hf_zero.system.sizes import size_text

_SMALL = 1 << 20  # bytes of a host that nobody asks about
COMPUTE, BUBBLE = "compute", "waiting for other stages"
# What a process on a CPU had resident, over what its tensors took: the least and the most that was seen (docs/plan.md).
_HOLES = (1.15, 1.9)
_SHOWN = 3  # largest things alive at the peak


@dataclass(frozen=True)
class Peak:
    """The most that one tier holds during a step.

    Attributes:
        nbytes: How much.
        index: The change that brought it; -1 where it was so before the step.
        label: What the engine was doing.
        alive: Bytes by tier and kind at that moment.
        largest: The largest storages of the tier then.
    """

    nbytes: int
    index: int
    label: str
    alive: Counter[tuple[str, str]]
    largest: tuple[str, ...]


@dataclass(frozen=True)
class Prediction:
    """What a configuration will take.

    Attributes:
        stages: What the engine did, on each stage of a pipeline; one where ranks are alike.
        stage: Which of them holds most where ranks compute.
        cluster: The ranks.
        hardware: What there is.
        peaks: By tier, of the stage with the most there.
        seconds: Of compute, waiting for other stages, sending inside the node and over the network, of what the hardware is said of.
        reasons: Why it does not fit, or what the answer rests on.
        fits: Whether it fits into what is said of the hardware.
        tokens: Of an optimizer step, of all ranks; 0 where nobody has said.
        imports: Bytes that a process has resident before there is a model; 0 where nobody has said.
    """

    stages: tuple[Observation, ...]
    stage: int
    cluster: Cluster
    hardware: Hardware
    peaks: dict[str, Peak]
    seconds: dict[str, float]
    reasons: tuple[str, ...]
    fits: bool
    tokens: int = 0
    imports: int = 0

    @property
    def observation(self) -> Observation:
        """Of the stage that holds most."""
        return self.stages[self.stage]

    @property
    def checkpoint_bytes(self) -> int:
        """Of all ranks together."""
        return sum(one.checkpoint_bytes for one in self.stages)

    @property
    def main(self) -> Peak:
        """The peak of where ranks compute."""
        return self.peaks["host" if self.cluster.on_host else "device"]

    def by_kind(self) -> dict[str, int]:
        """Return bytes of a rank by kind, over all tiers, at the moment of the main peak."""
        return {kind: sum(self.main.alive[tier, kind] for tier in TIERS) for kind in KINDS}

    def seconds_per_step(self) -> float | None:
        """Return seconds of a step if all overlaps but waiting for other stages; None without operations per second."""
        if COMPUTE not in self.seconds:
            return None
        return max(self.seconds[COMPUTE] + self.seconds.get(BUBBLE, 0.0), *(self.seconds.get(name, 0.0) for name in ("node", "network")))

    def tokens_per_second(self) -> float | None:
        """Tokens per second of all ranks if a step takes ``seconds_per_step``; None where that is not known."""
        seconds = self.seconds_per_step()
        return self.tokens / seconds if seconds and self.tokens else None

    def process_bytes(self) -> tuple[int, int] | None:
        """The least and the most that the process of a rank on a CPU is likely to have resident; None on a device.

        The C library's heap keeps holes in which no tensor finds room: another number in each run, so it is a range, and in no verdict.
        """
        if not self.cluster.on_host:
            return None
        least, most = (round(self.main.nbytes * factor) + self.imports for factor in _HOLES)
        return least, most

    def limits(self) -> list[tuple[str, int, float | None]]:
        """Tiers that hold anything, with their peaks, and what a rank may take of each; None where nobody has said."""
        host = host_limit(self.cluster, self.hardware)
        device = None if self.cluster.on_host else self.hardware.memory
        found = [("device", device), ("host", host), ("disk", None)]
        main = "host" if self.cluster.on_host else "device"
        return [(tier, self.peaks[tier].nbytes, limit) for tier, limit in found if self.peaks[tier].nbytes >= _SMALL or tier == main]

    def to_dict(self) -> dict[str, object]:
        """What ``--json`` prints."""
        sent = self.observation.per_step().sent
        return {
            "fits": self.fits,
            "peak_bytes_per_rank": {tier: self.peaks[tier].nbytes for tier in TIERS},
            "process_bytes": self.process_bytes(),
            "by_kind": self.by_kind(),
            "sent_bytes_per_step": {"node": round(sent.node), "network": round(sent.network)},
            "checkpoint_bytes": self.checkpoint_bytes,
            "seconds_per_step": self.seconds_per_step(),
            "tokens_per_second": self.tokens_per_second(),
            "reasons": list(self.reasons),
        }


def predict(stages: Sequence[Observation], cluster: Cluster, hardware: Hardware) -> Prediction:
    """Reads the books.

    Args:
        stages: What the engine did, on each stage of a pipeline; one where ranks are alike.
        cluster: The ranks.
        hardware: What there is.
    """
    found = {tier: [_peak(observation, tier, cluster.on_host) for observation in stages] for tier in TIERS}
    mains = [peak.nbytes for peak in found["host" if cluster.on_host else "device"]]
    stage = mains.index(max(mains))
    peaks = {tier: max(ones, key=lambda peak: peak.nbytes) for tier, ones in found.items()}
    faults = _faults(peaks, cluster, hardware)
    reasons = faults or _notes(peaks, cluster, hardware, stages[stage])
    if len(stages) > 1:
        others = ", ".join(f"stage {index} {size_text(nbytes)}" for index, nbytes in enumerate(mains) if index != stage)
        reasons.append(
            f"the stage shown is {stage} of {len(stages)} (from 0), whose ranks hold the most memory, {size_text(mains[stage])}; {others}"
        )
    reasons += dict.fromkeys(text for one in stages for text in one.assumptions)
    return Prediction(tuple(stages), stage, cluster, hardware, peaks, _seconds(stages, hardware), tuple(reasons), not faults)


def tier_of(storage: Storage, on_host: bool) -> str:
    """Return where a storage lies; the device of a rank on a CPU is the host."""
    return "host" if on_host and storage.tier == "device" else storage.tier


def levels(observation: Observation, on_host: bool) -> Iterator[tuple[int, Change | None, Counter[tuple[str, str]]]]:
    """Bytes by tier and kind before the measured step, index -1, and after each of its changes; one counter, changed in place."""
    alive: Counter[tuple[str, str]] = Counter()
    for index, change in enumerate(observation.changes):
        if index == observation.measured:
            yield -1, None, alive
        alive[tier_of(change.storage, on_host), change.storage.kind] += change.nbytes
        if index >= observation.measured:
            yield index, change, alive


def _peak(observation: Observation, tier: str, on_host: bool) -> Peak:
    most, at, label, then = -1, -1, "between steps", Counter[tuple[str, str]]()
    now = 0
    for index, change, alive in levels(observation, on_host):
        if change is None:
            now = sum(nbytes for (other, _), nbytes in alive.items() if other == tier)
        elif tier_of(change.storage, on_host) == tier:
            now += change.nbytes
        if now > most:
            most, at, label, then = now, index, change.label if change is not None else label, Counter(alive)
    return Peak(max(0, most), at, label.removeprefix("hf_zero::"), then, _largest(observation, tier, at, on_host))


def _largest(observation: Observation, tier: str, index: int, on_host: bool) -> tuple[str, ...]:
    """Return the largest storages of ``tier`` that are alive after change ``index``, in words."""
    sizes: Counter[Storage] = Counter()
    last = index if index >= 0 else observation.measured - 1
    for change in observation.changes[: last + 1]:
        if tier_of(change.storage, on_host) == tier:
            sizes[change.storage] += change.nbytes
    return tuple(_words(storage, nbytes) for storage, nbytes in sizes.most_common(_SHOWN) if nbytes)


def _words(storage: Storage, nbytes: int) -> str:
    shape = "x".join(map(str, storage.shape))
    where = f", made in {storage.label.removeprefix('hf_zero::')}" if storage.label else ""
    return f"{size_text(nbytes)} of {storage.kind}: {shape} {str(storage.dtype).removeprefix('torch.')}{where}"


def _faults(peaks: dict[str, Peak], cluster: Cluster, hardware: Hardware) -> list[str]:
    found = []
    device, host = peaks["device"], peaks["host"]
    if hardware.memory is not None and not cluster.on_host and device.nbytes > hardware.memory:
        kinds = Counter({kind: nbytes for (tier, kind), nbytes in device.alive.items() if tier == "device"}).most_common(3)
        most = ", ".join(f"{kind} {size_text(nbytes)}" for kind, nbytes in kinds)
        found.append(f"device memory: {size_text(device.nbytes)} at the peak ({device.label}) of {size_text(hardware.memory)}; {most}")
    limit, near = host_limit(cluster, hardware), cluster.near
    if limit is not None and host.nbytes > limit:
        found.append(f"host memory: {near} ranks x {size_text(host.nbytes)} is more than the {size_text(near * limit)} of a node")
    return found


def host_limit(cluster: Cluster, hardware: Hardware) -> float | None:
    """Bytes of host memory that a rank may take: its share of the node's (``memory`` where ranks compute there); None is not said."""
    of_node = hardware.host_memory if hardware.host_memory is not None or not cluster.on_host else hardware.memory
    return None if of_node is None else of_node / cluster.near


def _notes(peaks: dict[str, Peak], cluster: Cluster, hardware: Hardware, observation: Observation) -> list[str]:
    notes = []
    if cluster.on_host:
        notes.append(
            "a process takes more than its tensors: imports, and holes in the C library's heap, which differ from run to run (docs/plan.md)"
        )
    else:
        notes.append("not counted on a device: its driver's context, libraries' work space, and fragments of the allocator")
        if hardware.memory is None:
            notes.append("no --memory was given, so nothing was compared with it")
    if peaks["host"].nbytes > _SMALL and host_limit(cluster, hardware) is None:
        notes.append("no --host-memory was given, so nothing was compared with it")
    if hardware.flops is not None:
        notes.append("seconds_per_step is a lower bound: all operations at the rate of --tflops, all sending beside them")
        sent = observation.per_step().sent
        missing = [flag for nbytes, rate, flag in ((sent.network, hardware.link, "--link"), (sent.node, hardware.node_link, "--node-link"))
                   if nbytes and rate is None]  # fmt: skip
        notes += [f"{flag} was not given: sending over it is taken to cost nothing" for flag in missing]
    return notes


def _seconds(stages: Sequence[Observation], hardware: Hardware) -> dict[str, float]:
    """Of the stage with the most of each: all wait for the slowest."""
    steps = [one.per_step() for one in stages]
    most = max(step.work.flops for step in steps)
    rates: Sequence[tuple[str, float, float | None]] = (
        (COMPUTE, most, hardware.flops),
        *([(BUBBLE, most * stages[0].bubble, hardware.flops)] if stages[0].bubble else []),
        ("node", max(step.sent.node for step in steps), hardware.node_link),
        ("network", max(step.sent.network for step in steps), hardware.link),
    )
    return {name: amount / rate for name, amount, rate in rates if rate is not None}
