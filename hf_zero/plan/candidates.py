"""What a search may choose: how ranks are divided, the stage, what is offloaded, what becomes of activations, samples of a micro-step."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_zero.config.mesh import requested_experts, requested_slices, requested_stages
from hf_zero.errors import ConfigError

STAGES = (2, 1, 0, 3)
"""As they are looked at: what does not fit with stage 2 does not with 1 and 0."""
AXES = ("replicas", "tensor", "sequence", "experts", "pipeline")


@dataclass(frozen=True)
class Layout:
    """How the ranks are divided.

    Attributes:
        tensor: Ranks that hold one model together.
        sequence: Ranks that share sequences.
        experts: Ranks that hold all experts between them.
        pipeline: Ranks that hold the layers between them.
        shard_group: Ranks that hold everything once between them; 0 for all data-parallel ranks.
    """

    tensor: int = 1
    sequence: int = 1
    experts: int = 1
    pipeline: int = 1
    shard_group: int = 0

    @property
    def sharing(self) -> int:
        """Ranks that train on the same samples."""
        return self.tensor * self.sequence * self.pipeline

    def __str__(self) -> str:
        said = (
            ("tensor parallel", self.tensor),
            ("sequence parallel", self.sequence),
            ("expert parallel", self.experts),
            ("pipeline stages", self.pipeline),
        )
        words = [f"{name} {size}" for name, size in said if size > 1]
        return ", ".join([*words, *([f"shard groups of {self.shard_group}"] if self.shard_group else [])])


@dataclass(frozen=True)
class Tier:
    """Where the optimizer's states and the parameters rest.

    Attributes:
        optimizer: device, cpu or nvme.
        parameters: The same.
    """

    optimizer: str = "device"
    parameters: str = "device"

    def within(self, other: Tier) -> bool:
        """Return whether nothing rests farther away than with ``other``."""
        far = ("device", "cpu", "nvme").index
        return far(self.optimizer) <= far(other.optimizer) and far(self.parameters) <= far(other.parameters)

    def __str__(self) -> str:
        where = {"cpu": "on the host", "nvme": "on disk"}
        said = (("optimizer", self.optimizer), ("parameters", self.parameters))
        return ", ".join(f"{what} {where[place]}" for what, place in said if place in where)


TIERS = (Tier(), Tier("cpu"), Tier("cpu", "cpu"), Tier("nvme"), Tier("nvme", "nvme"))
"""From what is nearest to what is farthest."""


@dataclass(frozen=True)
class Family:
    """All but the samples of a micro-step.

    Attributes:
        layout: How the ranks are divided.
        stage: Of ZeRO.
        tier: What is offloaded.
        recomputes: Activations are recomputed in backward.
        moves: What the forward keeps for backward waits on the host: activations, or the inputs of layers where those are recomputed.
    """

    layout: Layout
    stage: int
    tier: Tier
    recomputes: bool
    moves: bool = False

    def __str__(self) -> str:
        kept = {(True, False): "recomputed activations", (False, True): "activations on the host"}
        both = "recomputed activations with the inputs of layers on the host" if self.recomputes and self.moves else ""
        words = (f"stage {self.stage}", str(self.layout), str(self.tier), both or kept.get((self.recomputes, self.moves), ""))
        return ", ".join(filter(None, words))


@dataclass(frozen=True)
class Candidate:
    """One configuration.

    Attributes:
        family: All but the samples of a micro-step.
        micro_batch: Those.
        accumulation: Micro-steps of an optimizer step.
    """

    family: Family
    micro_batch: int
    accumulation: int

    def __str__(self) -> str:
        return f"{self.family}, {self.accumulation} x micro batch {self.micro_batch}"


@dataclass(frozen=True)
class Space:
    """What a search looks through.

    Attributes:
        base: The configuration that holds what is not searched.
        ranks: Of all nodes.
        global_batch: Samples of an optimizer step.
        layouts: How the ranks may be divided, the plain way first.
        tiers: What may be offloaded.
        micro_batch: The only size allowed; None for all that divide.
        nvme_path: Folder of what goes to disk.
        moves: Activations may wait on the host.
    """

    base: Mapping[str, Any]
    ranks: int
    global_batch: int
    layouts: Sequence[Layout]
    tiers: Sequence[Tier]
    micro_batch: int | None = None
    nvme_path: str = ""
    moves: bool = False

    def micro_batches(self, layout: Layout) -> list[int]:
        """Sizes of a micro-step that make the global batch, from the smallest; none where it does not divide."""
        copies = self.ranks // layout.sharing
        if self.global_batch % copies:
            return []
        each = self.global_batch // copies
        return [size for size in range(1, each + 1) if each % size == 0 and self.micro_batch in (None, size)]

    def candidate(self, family: Family, micro_batch: int) -> Candidate:
        """``family`` with so many samples at a time."""
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
        if layout.experts > 1:
            config["expert_parallel"] = {**config.get("expert_parallel", {}), "enabled": True, "autoep_size": layout.experts}
        if layout.pipeline > 1:
            config["pipeline"] = {**config.get("pipeline", {}), "stages": layout.pipeline}
        config["train_batch_size"] = self.global_batch
        config["train_micro_batch_size_per_gpu"] = candidate.micro_batch
        config["gradient_accumulation_steps"] = candidate.accumulation
        return config


def layouts_of(base: Mapping[str, Any], ranks: int, ranks_per_node: int, axes: Collection[str]) -> list[Layout]:
    """Ways to divide the ranks: the plain one, then one axis at a time; only what ``base`` says where it says something.

    Args:
        base: The configuration.
        ranks: Of all nodes.
        ranks_per_node: Of one; tensor-parallel, sequence-parallel and expert-parallel ranks stay in it, stages need not.
        axes: Of ``AXES``, which to try.
    """
    zero, split = base.get("zero_optimization", {}), base.get("tensor_parallel", {})
    given = Layout(
        max(1, int(split.get("autotp_size") or 1)),
        requested_slices(base),
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
    return found + [Layout(pipeline=size) for size in stages if "pipeline" in axes]


def tiers_of(on_host: bool, nvme_path: str) -> list[Tier]:
    """What may be offloaded: where ranks compute on the host nothing goes there, and to disk only where a folder is named."""
    places = ["device", *([] if on_host else ["cpu"]), *(["nvme"] if nvme_path else [])]
    return [tier for tier in TIERS if {tier.optimizer, tier.parameters} <= set(places)]


def families_of(space: Space, layout: Layout) -> list[Family]:
    """Return all of one layout, from the fastest sort to the smallest: what is offloaded goes first, then recomputation, then the stage.

    Between stages of a pipeline the engine moves no activations.
    """
    return [
        Family(layout, stage, tier, recomputes, moves)
        for stage in STAGES
        for recomputes in (False, True)
        for moves in (False, True)[: 1 + (space.moves and layout.pipeline == 1)]
        for tier in space.tiers
        if _serves(stage, tier) and (stage or not layout.shard_group)
    ]


def _serves(stage: int, tier: Tier) -> bool:
    """Parameters are offloaded where they are sharded, and the optimizer where its states are."""
    return stage >= (3 if tier.parameters != "device" else 1 if tier.optimizer != "device" else 0)


def require_batch(space: Space) -> None:
    """Refuses a global batch that no layout can make.

    Raises:
        ConfigError: There is no micro batch for it.
    """
    if any(space.micro_batches(layout) for layout in space.layouts):
        return
    copies = sorted({space.ranks // layout.sharing for layout in space.layouts})
    wanted = f" in micro batches of {space.micro_batch}" if space.micro_batch else ""
    raise ConfigError(
        f"--global-batch {space.global_batch} cannot be made{wanted} by {' or '.join(map(str, copies))} data-parallel ranks: "
        "a multiple of one of these numbers (times --micro-batch where it is given) is allowed"
    )
