"""Evaluate the recording of one step: the peak of each tier, live memory at the peak, bytes sent, time, and whether it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_zero.core.holdings import KINDS, TIERS
from hf_zero.plan.inputs import Cluster, Hardware
from hf_zero.plan.recorder import Change, Storage
from hf_zero.plan.run import Observation
from hf_zero.system.sizes import size_text

_NEGLIGIBLE = 1 << 20  # bytes of host memory that reports leave out
COMPUTE, BUBBLE = "compute", "waiting for other stages"
# Resident memory of a process on a CPU over the bytes of its tensors: smallest and largest measured ratio (docs/plan.md).
_HEAP_FACTORS = (1.15, 1.9)
_SHOWN = 3  # number of largest storages at the peak in a report


@dataclass(frozen=True)
class Peak:
    """Peak memory of one tier during a step.

    Attributes:
        nbytes: Bytes at the peak.
        index: Index of the change that reached the peak; -1 if it was reached before the step.
        label: The engine's last note before the peak.
        alive: Bytes by tier and kind at the peak.
        largest: Descriptions of the largest storages of the tier at the peak.
    """

    nbytes: int
    index: int
    label: str
    alive: Counter[tuple[str, str]]
    largest: tuple[str, ...]


@dataclass(frozen=True)
class Prediction:
    """Predicted memory, traffic and time of one configuration.

    Attributes:
        stages: Recordings of a rank of each pipeline stage; one if all ranks are alike.
        stage: Index of the stage with the highest peak on the tier where ranks compute.
        cluster: Number and place of the ranks.
        hardware: Limits and rates of the hardware.
        peaks: Peak by tier, each of the stage with the highest.
        seconds: Seconds by activity (compute, waiting for other stages, sending inside the node and over the network) with a known rate.
        reasons: Reasons why the configuration does not fit, or assumptions of the prediction.
        fits: Whether all peaks are within the given limits.
        tokens: Tokens per optimizer step over all ranks; 0 if unknown.
        imports: Resident bytes of a process before it builds the model; 0 if unknown.
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
        """Return the recording of the stage with the highest peak."""
        return self.stages[self.stage]

    @property
    def checkpoint_bytes(self) -> int:
        """Return the bytes of a checkpoint, from all ranks and stages."""
        return sum(one.checkpoint_bytes for one in self.stages)

    @property
    def main(self) -> Peak:
        """Return the peak of the tier where ranks compute."""
        return self.peaks["host" if self.cluster.on_host else "device"]

    def by_kind(self) -> dict[str, int]:
        """Return bytes of a rank by kind, summed over all tiers, at the peak of the tier where ranks compute."""
        return {kind: sum(self.main.alive[tier, kind] for tier in TIERS) for kind in KINDS}

    def seconds_per_step(self) -> float | None:
        """Return a lower bound of the seconds per step: compute and communication overlap; None if the compute rate is unknown."""
        if COMPUTE not in self.seconds:
            return None
        return max(self.seconds[COMPUTE] + self.seconds.get(BUBBLE, 0.0), *(self.seconds.get(name, 0.0) for name in ("node", "network")))

    def tokens_per_second(self) -> float | None:
        """Return the tokens per second of all ranks for ``seconds_per_step``; None if one of both is unknown."""
        seconds = self.seconds_per_step()
        return self.tokens / seconds if seconds and self.tokens else None

    def process_bytes(self) -> tuple[int, int] | None:
        """Return the likely range of resident bytes of a rank's process on a CPU; None if ranks compute on devices.

        Fragmentation of the C library's heap differs from run to run. So the result is a range, and ``fits`` does not depend on it.
        """
        if not self.cluster.on_host:
            return None
        least, most = (round(self.main.nbytes * factor) + self.imports for factor in _HEAP_FACTORS)
        return least, most

    def limits(self) -> list[tuple[str, int, float | None]]:
        """Return (tier, peak bytes, limit of a rank in bytes) of each used tier; the limit is None if it was not given."""
        host = host_limit(self.cluster, self.hardware)
        device = None if self.cluster.on_host else self.hardware.memory
        found = [("device", device), ("host", host), ("disk", None)]
        main = "host" if self.cluster.on_host else "device"
        return [(tier, self.peaks[tier].nbytes, limit) for tier, limit in found if self.peaks[tier].nbytes >= _NEGLIGIBLE or tier == main]

    def to_dict(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
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
    """Return the prediction from the recordings of a step.

    Args:
        stages: Recordings of a rank of each pipeline stage; one if all ranks are alike.
        cluster: Number and place of the ranks.
        hardware: Limits and rates of the hardware.
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
            f"memory is shown for pipeline stage {stage} of {len(stages)} (from 0), which has the highest peak: {size_text(mains[stage])}; "
            f"{others}"
        )
    reasons += dict.fromkeys(text for one in stages for text in one.assumptions)
    return Prediction(tuple(stages), stage, cluster, hardware, peaks, _seconds(stages, hardware), tuple(reasons), not faults)


def tier_of(storage: Storage, on_host: bool) -> str:
    """Return the tier of a storage; if ranks compute on CPUs, the device counts as the host."""
    return "host" if on_host and storage.tier == "device" else storage.tier


def levels(observation: Observation, on_host: bool) -> Iterator[tuple[int, Change | None, Counter[tuple[str, str]]]]:
    """Yield (index, change, bytes by tier and kind) before the measured step (index -1) and after each of its changes.

    The counter is one object that is updated in place.
    """
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
    """Return descriptions of the largest storages of ``tier`` after the change ``index``."""
    sizes: Counter[Storage] = Counter()
    last = index if index >= 0 else observation.measured - 1
    for change in observation.changes[: last + 1]:
        if tier_of(change.storage, on_host) == tier:
            sizes[change.storage] += change.nbytes
    return tuple(_describe(storage, nbytes) for storage, nbytes in sizes.most_common(_SHOWN) if nbytes)


def _describe(storage: Storage, nbytes: int) -> str:
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
    """Return the bytes of host memory per rank: the node's host memory (or ``memory`` on CPUs) over its ranks; None if not given."""
    of_node = hardware.host_memory if hardware.host_memory is not None or not cluster.on_host else hardware.memory
    return None if of_node is None else of_node / cluster.near


def _notes(peaks: dict[str, Peak], cluster: Cluster, hardware: Hardware, observation: Observation) -> list[str]:
    notes = []
    if cluster.on_host:
        notes.append(
            "the peak counts tensors only; imports and fragmentation of the C library's heap, which differs from run to run, are in the "
            "range of the process (docs/plan.md)"
        )
    else:
        notes.append("not counted: the driver's context, work space of libraries, and fragmentation of the device's allocator")
        if hardware.memory is None:
            notes.append("no --memory was given, so device memory was not compared with a limit")
    if peaks["host"].nbytes > _NEGLIGIBLE and host_limit(cluster, hardware) is None:
        notes.append("no --host-memory was given, so host memory was not compared with a limit")
    if hardware.flops is not None:
        notes.append("seconds_per_step is a lower bound: all operations run at --tflops, and all communication overlaps with them")
        sent = observation.per_step().sent
        missing = [flag for nbytes, rate, flag in ((sent.network, hardware.link, "--link"), (sent.node, hardware.node_link, "--node-link"))
                   if nbytes and rate is None]  # fmt: skip
        notes += [f"{flag} was not given: traffic over this link is assumed to take no time" for flag in missing]
    return notes


def _seconds(stages: Sequence[Observation], hardware: Hardware) -> dict[str, float]:
    """Return seconds by activity, each of the slowest stage, because all stages wait for it."""
    steps = [one.per_step() for one in stages]
    most = max(step.work.flops for step in steps)
    rates: Sequence[tuple[str, float, float | None]] = (
        (COMPUTE, most, hardware.flops),
        *([(BUBBLE, most * stages[0].bubble, hardware.flops)] if stages[0].bubble else []),
        ("node", max(step.sent.node for step in steps), hardware.node_link),
        ("network", max(step.sent.network for step in steps), hardware.link),
    )
    return {name: amount / rate for name, amount, rate in rates if rate is not None}
