"""Enumerate the search space of ``plan --fit``: layouts, ZeRO stages, offload, recomputation and micro-batch sizes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_zero.config.mesh import requested_context, requested_experts, requested_slices, requested_stages
from hf_zero.errors import ConfigError

STAGES = (2, 1, 0, 3)
"""ZeRO stages in search order: a candidate that does not fit with stage 2 does not fit with 1 and 0."""
EVERY = (4, 2)
"""Choices of recomputation between none and all: one of so many blocks, by growing share."""
AXES = ("replicas", "tensor", "sequence", "context", "experts", "pipeline")


@dataclass(frozen=True)
class Layout:
    """One division of the ranks over the parallel axes.

    Attributes:
        tensor: Tensor-parallel size: ranks over which layers are split.
        sequence: Sequence-parallel size: ranks over which each sequence is split by exchanges of heads; with ``context``, inside each of
            its places.
        context: Context-parallel size: ranks over which each sequence is split by gathers of keys and values.
        experts: Expert-parallel size: ranks over which experts are divided.
        pipeline: Number of pipeline stages.
        shard_group: Ranks over which ZeRO shards states; 0 for all data-parallel ranks.
    """

    tensor: int = 1
    sequence: int = 1
    context: int = 1
    experts: int = 1
    pipeline: int = 1
    shard_group: int = 0

    @property
    def sharing(self) -> int:
        """Return the number of ranks that train on the same samples."""
        return self.tensor * self.sequence * self.context * self.pipeline

    def __str__(self) -> str:
        said = (
            ("tensor parallel", self.tensor),
            ("sequence parallel", self.sequence),
            ("context parallel", self.context),
            ("expert parallel", self.experts),
            ("pipeline stages", self.pipeline),
        )
        words = [f"{name} {size}" for name, size in said if size > 1]
        return ", ".join([*words, *([f"shard groups of {self.shard_group}"] if self.shard_group else [])])


@dataclass(frozen=True)
class Tier:
    """One choice of offload: the tiers of optimizer states and parameters.

    Attributes:
        optimizer: Tier of the optimizer states: device, cpu or nvme.
        parameters: Tier of the parameters: device, cpu or nvme.
    """

    optimizer: str = "device"
    parameters: str = "device"

    def within(self, other: Tier) -> bool:
        """Return whether neither tier is farther from the device than with ``other``."""
        far = ("device", "cpu", "nvme").index
        return far(self.optimizer) <= far(other.optimizer) and far(self.parameters) <= far(other.parameters)

    def __str__(self) -> str:
        where = {"cpu": "on the host", "nvme": "on disk"}
        said = (("optimizer", self.optimizer), ("parameters", self.parameters))
        return ", ".join(f"{what} {where[place]}" for what, place in said if place in where)


TIERS = (Tier(), Tier("cpu"), Tier("cpu", "cpu"), Tier("nvme"), Tier("nvme", "nvme"))
"""All choices of offload, from the device to files."""


@dataclass(frozen=True)
class Family:
    """Candidates that differ only in their micro-batch size.

    Attributes:
        layout: Division of the ranks.
        stage: ZeRO stage.
        tier: Choice of offload.
        recomputes: One of this many blocks is recomputed in backward: 1 recomputes all blocks, 0 none.
        moves: Whether saved activations (of recomputed blocks, their inputs) are offloaded to the host between forward and backward.
    """

    layout: Layout
    stage: int
    tier: Tier
    recomputes: int
    moves: bool = False

    @property
    def share(self) -> float:
        """Return the part of the blocks that is recomputed, from 0 to 1."""
        return 1 / self.recomputes if self.recomputes else 0.0

    def __str__(self) -> str:
        return ", ".join(filter(None, (f"stage {self.stage}", str(self.layout), str(self.tier), self._activations())))

    def _activations(self) -> str:
        if self.recomputes > 1:
            return f"recomputed activations of 1 in {self.recomputes} blocks" + ", others on the host" * self.moves
        if self.recomputes:
            return "recomputed activations" + " with the inputs of layers on the host" * self.moves
        return "activations on the host" if self.moves else ""


@dataclass(frozen=True)
class Candidate:
    """One candidate configuration of the search space.

    Attributes:
        family: All choices but the micro-batch size.
        micro_batch: Samples per rank and micro-step.
        accumulation: Micro-steps per optimizer step.
    """

    family: Family
    micro_batch: int
    accumulation: int

    def __str__(self) -> str:
        return f"{self.family}, {self.accumulation} x micro batch {self.micro_batch}"


@dataclass(frozen=True)
class Space:
    """The search space.

    Attributes:
        base: The DeepSpeed configuration that all candidates share.
        ranks: Number of ranks over all nodes.
        global_batch: Samples per optimizer step over all ranks.
        layouts: Allowed layouts, pure data parallelism first.
        tiers: Allowed choices of offload.
        micro_batch: The only allowed micro-batch size; None allows every size that divides.
        nvme_path: Folder for offload to files.
        moves: Whether to try offload of activations to the host.
        recomputes: Choices of recomputation to try beside none, by growing share of recomputed blocks.
    """

    base: Mapping[str, Any]
    ranks: int
    global_batch: int
    layouts: Sequence[Layout]
    tiers: Sequence[Tier]
    micro_batch: int | None = None
    nvme_path: str = ""
    moves: bool = False
    recomputes: Sequence[int] = (1,)

    def micro_batches(self, layout: Layout) -> list[int]:
        """Return the micro-batch sizes that divide the global batch, ascending; empty if the data-parallel ranks do not divide it."""
        copies = self.ranks // layout.sharing
        if self.global_batch % copies:
            return []
        each = self.global_batch // copies
        return [size for size in range(1, each + 1) if each % size == 0 and self.micro_batch in (None, size)]

    def candidate(self, family: Family, micro_batch: int) -> Candidate:
        """Return the candidate of ``family`` with ``micro_batch`` samples per micro-step."""
        copies = self.ranks // family.layout.sharing
        return Candidate(family, micro_batch, self.global_batch // copies // micro_batch)

    def config(self, candidate: Candidate) -> dict[str, Any]:
        """Return the DeepSpeed configuration of ``candidate``."""
        family, layout = candidate.family, candidate.family.layout
        config = copy.deepcopy(dict(self.base))
        zero = {**config.get("zero_optimization", {}), "stage": family.stage}
        for name, place in (("offload_optimizer", family.tier.optimizer), ("offload_param", family.tier.parameters)):
            zero.pop(name, None)
            if place != "device":
                zero[name] = {"device": place, **({"nvme_path": self.nvme_path} if place == "nvme" else {"pin_memory": True})}
        if family.stage == 3:
            zero.setdefault("stage3_gather_16bit_weights_on_model_save", True)
        if layout.shard_group:
            zero["mics_shard_size"] = layout.shard_group
        config["zero_optimization"] = zero
        if layout.tensor > 1:
            config["tensor_parallel"] = {**config.get("tensor_parallel", {}), "autotp_size": layout.tensor}
        if layout.sequence > 1:
            config["sequence_parallel_size"] = layout.sequence
        if layout.context > 1:
            config["hf_zero"] = {**config.get("hf_zero", {}), "context_parallel_size": layout.context}
        if layout.experts > 1:
            config["expert_parallel"] = {**config.get("expert_parallel", {}), "enabled": True, "autoep_size": layout.experts}
        if layout.pipeline > 1:
            config["pipeline"] = {**config.get("pipeline", {}), "stages": layout.pipeline}
        config["train_batch_size"] = self.global_batch
        config["train_micro_batch_size_per_gpu"] = candidate.micro_batch
        config["gradient_accumulation_steps"] = candidate.accumulation
        return config


def layouts_of(base: Mapping[str, Any], ranks: int, ranks_per_node: int, axes: Collection[str]) -> list[Layout]:
    """Return the layouts to search; if ``base`` sets a layout, only this one.

    These are pure data parallelism, then each axis alone, then sequences split by heads inside nodes and by keys across nodes.

    Args:
        base: The DeepSpeed configuration that all candidates share.
        ranks: Number of ranks over all nodes.
        ranks_per_node: Ranks of one node. Tensor-, sequence- and expert-parallel groups stay inside a node; pipeline stages and
            context-parallel groups need not.
        axes: The axes to try, from ``AXES``.
    """
    zero, split = base.get("zero_optimization", {}), base.get("tensor_parallel", {})
    given = Layout(
        max(1, int(split.get("autotp_size") or 1)),
        requested_slices(base),
        requested_context(base),
        requested_experts(base),
        requested_stages(base),
        max(0, int(zero.get("mics_shard_size", 0))),
    )
    if given != Layout():
        return [given]
    sizes = [size for size in range(2, ranks_per_node + 1) if ranks_per_node % size == 0]
    stages = [size for size in range(2, max(ranks_per_node, ranks // ranks_per_node) + 1) if ranks % size == 0]
    found = [Layout(), *([Layout(shard_group=ranks_per_node)] if "replicas" in axes and ranks > ranks_per_node > 1 else [])]
    found += [Layout(**{axis: size}) for axis in ("tensor", "sequence", "experts") if axis in axes for size in sizes]
    if "context" in axes:
        found += [Layout(context=size) for size in range(2, ranks + 1) if ranks % size == 0]
        groups = [size for size in range(2 * ranks_per_node, ranks + 1, ranks_per_node) if ranks % size == 0]  # of whole nodes
        found += [Layout(sequence=size, context=group // size) for group in groups for size in sizes if "sequence" in axes]
    return found + [Layout(pipeline=size) for size in stages if "pipeline" in axes]


def tiers_of(on_host: bool, nvme_path: str) -> list[Tier]:
    """Return the choices of offload to search: to the host only if ranks compute on devices, to files only if ``nvme_path`` is set."""
    places = ["device", *([] if on_host else ["cpu"]), *(["nvme"] if nvme_path else [])]
    return [tier for tier in TIERS if {tier.optimizer, tier.parameters} <= set(places)]


def families_of(space: Space, layout: Layout) -> list[Family]:
    """Return all families of ``layout`` in search order: by stage, then recomputation, then offload.

    With a pipeline there is no offload of activations, and all blocks are recomputed or none.
    """
    return [
        Family(layout, stage, tier, recomputes, moves)
        for stage in STAGES
        for recomputes in (0, *(space.recomputes if layout.pipeline == 1 else (1,)))
        for moves in (False, True)[: 1 + (space.moves and layout.pipeline == 1)]
        for tier in space.tiers
        if _shards_offloaded(stage, tier) and (stage or not layout.shard_group)
    ]


def _shards_offloaded(stage: int, tier: Tier) -> bool:
    """Return whether ``stage`` shards the tensors that ``tier`` offloads: parameters from stage 3 on, optimizer states from stage 1 on."""
    return stage >= (3 if tier.parameters != "device" else 1 if tier.optimizer != "device" else 0)


def require_batch(space: Space) -> None:
    """Raise unless some layout can divide the global batch.

    Raises:
        ConfigError: No layout has a micro-batch size that divides the global batch.
    """
    if any(space.micro_batches(layout) for layout in space.layouts):
        return
    copies = sorted({space.ranks // layout.sharing for layout in space.layouts})
    wanted = f" in micro batches of {space.micro_batch}" if space.micro_batch else ""
    raise ConfigError(
        f"--global-batch {space.global_batch} cannot be divided{wanted} over {' or '.join(map(str, copies))} data-parallel ranks: "
        "a multiple of one of these numbers (times --micro-batch if it is given) is allowed"
    )
