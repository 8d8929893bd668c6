"""The ranks of a run as a mesh of named axes: the sizes that each source gives, and the one mesh that fits all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_zero.errors import ConfigError, UnsupportedError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
"""From the outermost to the innermost: adjacent ranks are near each other, so the axis that sends most often is innermost."""

EXPERT = "ep"  # no axis of its own: adjacent ranks of a shard group that hold all experts together
DATA = "dp"  # dp_replicate and dp_shard together
SHARD_GROUP = "shard group"  # the ranks that parameters are sharded over: dp_shard, cp and sp together
_SHARED = ("pp", "cp", "sp", "tp")  # axes whose ranks train on the same samples
_MOST_REPLICAS = 1024  # that are tried where nobody gave the number of ranks
_VARIABLE = "PARALLELISM_CONFIG_{}_SIZE"


@dataclass(frozen=True)
class Claim:
    """Size of one axis, as one source gives it.

    axis: One of ``AXES``, a product of some of them (``DATA`` or ``SHARD_GROUP``), or ``EXPERT``, which divides a shard group.
    size: Number of ranks.
    source: Name of the source for the user: a key, an argument, a variable.
    """

    axis: str
    size: int
    source: str

    def __str__(self) -> str:
        return f"{self.source}: {self.axis} {self.size}"


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes, whose product is the number of ranks, with their sources. Rank 0 is first on every axis; ``tp`` varies fastest.

    Attributes:
        dp_replicate: Number of shard groups, each with a whole set of shards.
        dp_shard: Number of ranks of a shard group that train on samples of their own.
        cp: Number of ranks that share sequences through context parallelism.
        sp: Number of ranks that share sequences through sequence parallelism.
        tp: Number of ranks that hold one layer together.
        claims: Sizes that the sources gave.
        ep: Number of adjacent ranks of a shard group, each with the ranks that hold a layer together with it, that hold all experts
            together. It does not change which rank trains on which samples.
        pp: Number of pipeline stages, which hold the layers of one model together.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1
    claims: tuple[Claim, ...] = ()
    ep: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return math.prod(self.sizes.values())

    @property
    def replicas(self) -> int:
        """Return the data-parallel size: the number of ranks, or groups of ranks, that train on samples of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def sharers(self) -> int:
        """Return the number of ranks that train on the same samples."""
        return self.cp * self.sp * self.tp * self.pp

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of every axis, from the outermost to the innermost."""
        return {axis: int(getattr(self, axis)) for axis in AXES}

    @property
    def dims(self) -> dict[str, int]:
        """Return the axes of more than one rank, from the outermost to the innermost."""
        return {axis: size for axis, size in self.sizes.items() if size > 1}

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items()) + (f", {EXPERT} {self.ep}" if self.ep > 1 else "")


# -- sizes from each source --------------------------------------------------------------------------------------------


def claims_of_config(config: Mapping[str, Any], where: str = "") -> list[Claim]:
    """Return the sizes that the keys of a configuration give, as the user wrote them; the schema reports values that are no numbers.

    Args:
        config: The configuration.
        where: Text after each key in messages, if there are several configurations.
    """
    found = {
        "tp": ("tensor_parallel.autotp_size", requested_ranks(config)),
        "sp": ("sequence_parallel_size", requested_slices(config)),
        "cp": ("hf_zero.context_parallel_size", requested_context(config)),
        EXPERT: ("expert_parallel.autoep_size", requested_experts(config)),
        "pp": ("pipeline.stages", requested_stages(config)),
    }
    claims = [Claim(axis, size, key + where) for axis, (key, size) in found.items() if size > 1 or axis in _alone(config)]
    data = _number(config.get("data_parallel_size"))
    if data is not None and data > 0:
        claims.append(Claim(DATA, data, f"data_parallel_size{where}"))
    group = _number(_section(config, "zero_optimization").get("mics_shard_size"))
    if group is not None and group > 0:
        claims.append(Claim(SHARD_GROUP, group, f"zero_optimization.mics_shard_size{where}"))
    return claims


def claims_of_sizes(parallelism_config: Any) -> Iterator[Claim]:
    """Yield the sizes of accelerate's ParallelismConfig; a 1 is a default and counts as not given."""
    for axis in AXES:
        size = getattr(parallelism_config, f"{axis}_size", None) or 1
        if size > 1:
            yield Claim(axis, size, f"ParallelismConfig.{axis}_size")


def _alone(config: Mapping[str, Any]) -> set[str]:
    """Return the axes that a configuration explicitly sets to one rank, which contradicts a source with more."""
    experts, pipeline = _section(config, "expert_parallel"), _section(config, "pipeline")
    switched_on = {EXPERT: _enabled(experts) and _number(experts.get("autoep_size")) == 1, "pp": _number(pipeline.get("stages")) == 1}
    return {axis for axis, said in switched_on.items() if said}


def requested_ranks(config: Mapping[str, Any]) -> int:
    """Return ``tensor_parallel.autotp_size`` of a configuration as the user gave it; 1 if it is not given."""
    return max(1, _number(_section(config, "tensor_parallel").get("autotp_size")) or 1)


def requested_slices(config: Mapping[str, Any]) -> int:
    """Return ``sequence_parallel_size`` of a configuration as the user gave it; 1 if it is not given."""
    return max(1, _number(config.get("sequence_parallel_size")) or 1)


def requested_context(config: Mapping[str, Any]) -> int:
    """Return ``hf_zero.context_parallel_size`` of a configuration as the user gave it; 1 if it is not given."""
    return max(1, _number(_section(config, "hf_zero").get("context_parallel_size")) or 1)


def requested_experts(config: Mapping[str, Any]) -> int:
    """Return ``expert_parallel.autoep_size`` of a configuration as the user gave it; 1 if it is not given, or not enabled."""
    section = _section(config, "expert_parallel")
    return max(1, _number(section.get("autoep_size")) or 1) if _enabled(section) else 1


def requested_stages(config: Mapping[str, Any]) -> int:
    """Return ``pipeline.stages`` of a configuration as the user gave it; 1 if it is not given."""
    return max(1, _number(_section(config, "pipeline").get("stages")) or 1)


def claims_of_environment(environ: Mapping[str, str]) -> list[Claim]:
    """Return the sizes that ``accelerate launch`` has written into the environment; a 1 is a default and counts as not given.

    Raises:
        ConfigError: A variable is no whole number of at least 1.
    """
    claims = []
    for axis in AXES:
        name = _VARIABLE.format(axis.upper())
        size = _number(environ.get(name, 1))
        if size is None or size < 1:
            raise ConfigError(f"environment variable {name} is {environ[name]!r}; a whole number from 1 on is allowed")
        if size > 1:
            claims.append(Claim(axis, size, name))
    return claims


def claims_of_pair(mesh_param: Any) -> list[Claim]:
    """Return the sizes of DeepSpeed's ``mesh_param``: (data-parallel size, sequence-parallel size), or None.

    Raises:
        ConfigError: ``mesh_param`` is no such pair.
    """
    if mesh_param is None:
        return []
    try:
        data, sequence = (int(part) for part in mesh_param)
    except (TypeError, ValueError):
        raise ConfigError(f"mesh_param is {mesh_param!r}; (data-parallel size, sequence-parallel size) is allowed") from None
    return [Claim(DATA, data, "mesh_param"), Claim("sp", sequence, "mesh_param")]


def _enabled(section: Mapping[str, Any]) -> bool:
    return str(section.get("enabled")).strip().lower() in ("true", "yes", "on", "1")


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _number(value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        return None


# -- the mesh that fits all sources ------------------------------------------------------------------------------------


def solve(claims: Iterable[Claim], ranks: int, fits_nodes: Callable[[int], bool] = lambda size: True) -> Mesh:
    """Return the mesh of ``ranks`` that fits every claim.

    An axis without a claim has one rank, except ``dp_shard``, which gets all remaining ranks.

    Args:
        claims: The sizes that all sources give.
        ranks: Number of ranks of the mesh.
        fits_nodes: Function that returns whether groups of so many adjacent ranks fit the nodes; messages suggest only sizes that do.

    Raises:
        ConfigError: Claims contradict each other, or their product is not the number of ranks. The message shows all of them.
        UnsupportedError: Sequence and tensor parallelism together, or a pipeline with divided sequences.
    """
    said = tuple(dict.fromkeys(claims))
    sizes = require_shareable(said, ranks)
    data = ranks // math.prod(sizes.get(axis, 1) for axis in _SHARED)
    shared = ranks // data
    if sizes.get(DATA, data) != data:
        raise ConfigError(_mismatch(said, ranks, f"{sizes[DATA]} x {shared} makes {sizes[DATA] * shared} ranks", [data], DATA))
    replicate = _shard_groups(said, sizes, ranks, data, fits_nodes)
    if data % replicate:
        usable = [found for found in _divisors(data) if found == 1 or fits_nodes(ranks // found)]
        raise ConfigError(_mismatch(said, ranks, f"dp_replicate is {replicate}", usable, "dp_replicate"))
    shard, cp, sp, tp = sizes.get("dp_shard", data // replicate), *(sizes.get(axis, 1) for axis in ("cp", "sp", "tp"))
    mesh = Mesh(replicate, shard, cp, sp, tp, said, sizes.get(EXPERT, 1), sizes.get("pp", 1))
    if mesh.ranks != ranks:
        raise ConfigError(_mismatch(said, ranks, f"{mesh} makes {mesh.ranks} ranks", [data // replicate], "dp_shard"))
    _require_experts_fit(mesh)
    return mesh


def least(claims: Iterable[Claim]) -> Mesh:
    """Return the mesh with the least number of ranks that fits every claim.

    Raises:
        ConfigError: No number of ranks fits; the message is that of ``solve`` for a data-parallel size of 1.
        UnsupportedError: As ``solve``.
    """
    said = tuple(claims)
    shared = math.prod(claim.size for claim in dict.fromkeys(said) if claim.axis in _SHARED)
    for data in range(1, _MOST_REPLICAS + 1):
        try:
            return solve(said, shared * data)
        except ConfigError:
            continue
    return solve(said, shared)


def require_shareable(claims: Sequence[Claim], ranks: int) -> dict[str, int]:
    """Return the size of each axis that has a claim; raise for conflicts that no further claim can resolve.

    Args:
        claims: Sizes that some of the sources give.
        ranks: Number of ranks of the mesh.

    Raises:
        ConfigError: Claims contradict each other, or the ranks that are to share their samples do not divide all ranks.
        UnsupportedError: As ``solve``.
    """
    sizes = _agreed(claims)
    _require_served(claims, sizes)
    shared = math.prod(sizes.get(axis, 1) for axis in _SHARED)
    if ranks % shared:
        raise ConfigError(_mismatch(claims, ranks, f"{shared} ranks (pp x cp x sp x tp) are to share their samples", _divisors(ranks)))
    return sizes


def _require_experts_fit(mesh: Mesh) -> None:
    """Refuse an expert axis that does not divide the shard group: ranks that hold a layer together hold different experts, so all of
    them belong to this axis.
    """
    group, size = mesh.dp_shard * mesh.cp * mesh.sp * mesh.tp, mesh.ep
    found = f"{EXPERT} {size} does not divide the {group} ranks that parameters are sharded over"
    if mesh.tp > 1:
        found = f"{EXPERT} {size} is no multiple of tp {mesh.tp}, or does not divide the {group} ranks that parameters are divided over"
    if size > 1 and (group % size or size % mesh.tp):
        raise ConfigError(_mismatch(mesh.claims, mesh.ranks, found, [fits for fits in _divisors(group) if fits % mesh.tp == 0], EXPERT))


def _agreed(claims: Sequence[Claim]) -> dict[str, int]:
    """Return the size of each axis that has a claim.

    Raises:
        ConfigError: A size is below 1, or claims differ.
    """
    sizes: dict[str, int] = {}
    for claim in claims:
        if claim.size < 1:
            raise ConfigError(f"{claim.source} is {claim.size}; a whole number from 1 on is allowed")
        if sizes.setdefault(claim.axis, claim.size) != claim.size:
            against = [other for other in claims if other.axis == claim.axis]
            raise ConfigError(
                f"the mesh of ranks is described in several places that contradict each other:\n{_listed(against)}\n"
                "Set each size in one place, or to the same value everywhere"
            )
    return sizes


def _require_served(claims: Sequence[Claim], sizes: Mapping[str, int]) -> None:
    sequence, model = (next((claim for claim in claims if claim.axis == axis and claim.size > 1), None) for axis in ("sp", "tp"))
    _require_served_pipeline(claims, sizes)
    if sequence is not None and model is not None:
        raise UnsupportedError(
            f"{model.source} is {model.size} and {sequence.source} is {sequence.size}, tensor and sequence parallelism: the two cannot be "
            "combined; context parallelism (hf_zero.context_parallel_size) divides sequences beside tensor parallelism, and "
            "zero_optimization.stage 3 shards the parameters over all ranks of both axes"
        )


def _require_served_pipeline(claims: Sequence[Claim], sizes: Mapping[str, int]) -> None:
    """Refuse a pipeline with divided sequences, whose slices cannot be computed in parts of a batch; allow all other axes."""
    if sizes.get("pp", 1) == 1:
        return
    other = next((claim for claim in claims if claim.axis in ("sp", "cp") and claim.size > 1), None)
    if other is not None:
        kind = "sequence" if other.axis == "sp" else "context"
        raise UnsupportedError(
            f"a pipeline of {sizes['pp']} stages and {kind} parallelism ({other}) cannot be combined: the losses of slices are joined "
            "over a whole batch, and a pipeline computes it in parts. Pipelines can be combined with data, "
            "tensor and expert parallelism and shard groups; for long sequences tensor parallelism divides activations too. "
            f"The mesh is described by\n{_listed(claims)}"
        )


def _shard_groups(claims: Sequence[Claim], sizes: Mapping[str, int], ranks: int, data: int, fits_nodes: Callable[[int], bool]) -> int:
    """Return ``dp_replicate``, given directly or by the size of a shard group."""
    group = sizes.get(SHARD_GROUP)
    if group is None:
        return sizes.get("dp_replicate", 1)
    together = sizes.get("cp", 1) * sizes.get("sp", 1)
    if (data * together) % group or group % together:
        usable = [found * together for found in _divisors(data) if found == data or fits_nodes(found * together * sizes.get("tp", 1))]
        raise ConfigError(
            _mismatch(claims, ranks, f"shard groups of {group} do not divide {data * together} data-parallel ranks", usable, SHARD_GROUP)
        )
    found = data * together // group
    if sizes.get("dp_replicate", found) != found:
        made = f"dp_replicate {sizes['dp_replicate']} x shard group {group} makes {sizes['dp_replicate'] * group} data-parallel ranks"
        raise ConfigError(_mismatch(claims, ranks, made, [data * together // sizes["dp_replicate"]], SHARD_GROUP))
    return found


def _mismatch(claims: Sequence[Claim], ranks: int, found: str, usable: Sequence[int], axis: str = "") -> str:
    fits = f"{axis} {' or '.join(map(str, usable))} would fit".strip()
    if ranks == 1:
        fits += "; to train on more ranks, start the script by a launcher (torchrun --nproc_per_node N, accelerate launch)"
    return f"the mesh does not fit the {ranks} rank(s): {found}; {fits}. It is described by\n{_listed(claims)}"


def _listed(claims: Iterable[Claim]) -> str:
    return "\n".join(f"- {claim}" for claim in claims)


def _divisors(number: int) -> list[int]:
    return [found for found in range(1, number + 1) if number % found == 0]
