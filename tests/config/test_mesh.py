"""The ranks of a run as a mesh: what the sources say, and the one description that fits all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.config.mesh import AXES, Claim, Mesh, claims_of_config, claims_of_environment, claims_of_pair, requested_ranks, solve
from hf_zero.errors import ConfigError, UnsupportedError

SIZE = st.integers(1, 5)


@given(replicate=SIZE, shard=SIZE, shared=SIZE, axis=st.sampled_from(["sp", "tp"]), unsaid=st.booleans())
def test_sizes_that_fit_are_found_whoever_says_them(replicate: int, shard: int, shared: int, axis: str, unsaid: bool) -> None:
    ranks = replicate * shard * shared
    claims = [Claim("dp_replicate", replicate, "a"), Claim(axis, shared, "b"), *([] if unsaid else [Claim("dp_shard", shard, "c")])]
    mesh = solve(claims, ranks)
    assert mesh.sizes == {"pp": 1, "dp_replicate": replicate, "dp_shard": shard, "cp": 1, "sp": 1, "tp": 1, axis: shared}
    assert (mesh.ranks, mesh.replicas, mesh.sharers) == (ranks, replicate * shard, shared)
    assert math.prod(mesh.dims.values()) == ranks and list(mesh.dims) == [name for name in AXES if name in mesh.dims]
    group = solve([Claim(axis, shared, "b"), Claim("shard group", shard * mesh.sp, "mics_shard_size")], ranks)
    assert group.sizes == mesh.sizes
    with pytest.raises(ConfigError, match="would fit"):
        solve([*claims, Claim("dp", 7 * ranks, "d")], ranks)


def test_nobody_speaks_and_all_ranks_are_one_shard_group() -> None:
    assert solve([], 6) == Mesh(dp_shard=6)
    assert str(solve([], 6)) == "pp 1 x dp_replicate 1 x dp_shard 6 x cp 1 x sp 1 x tp 1"


@pytest.mark.parametrize(
    ("config", "claims"),
    [
        ({}, []),
        ({"tensor_parallel": {"autotp_size": 2}}, [Claim("tp", 2, "tensor_parallel.autotp_size")]),
        ({"tensor_parallel": {"autotp_size": "auto"}, "sequence_parallel_size": [2], "data_parallel_size": "auto"}, []),
        ({"tensor_parallel": None, "zero_optimization": True}, []),
        ({"sequence_parallel_size": "2"}, [Claim("sp", 2, "sequence_parallel_size")]),
        ({"data_parallel_size": 3}, [Claim("dp", 3, "data_parallel_size")]),
        ({"zero_optimization": {"mics_shard_size": 4}}, [Claim("shard group", 4, "zero_optimization.mics_shard_size")]),
        ({"zero_optimization": {"mics_shard_size": -1}}, []),
    ],
)  # fmt: skip
def test_keys_of_a_configuration(config: dict[str, Any], claims: list[Claim]) -> None:
    assert claims_of_config(config) == claims
    assert requested_ranks(config) == next((claim.size for claim in claims if claim.axis == "tp"), 1)


def test_variables_of_the_launcher() -> None:
    variables = {"PARALLELISM_CONFIG_TP_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1", "PARALLELISM_CONFIG_CP_BACKEND": "torch"}
    assert claims_of_environment(variables) == [Claim("tp", 2, "PARALLELISM_CONFIG_TP_SIZE")]
    for wrong in ("two", "0", ""):
        with pytest.raises(ConfigError, match="PARALLELISM_CONFIG_SP_SIZE is .* a whole number from 1 on"):
            claims_of_environment({"PARALLELISM_CONFIG_SP_SIZE": wrong})


def test_the_pair_that_initialize_takes() -> None:
    assert claims_of_pair(None) == []
    assert solve(claims_of_pair((2, 2)), 4) == Mesh(dp_shard=2, sp=2, claims=(Claim("dp", 2, "mesh_param"), Claim("sp", 2, "mesh_param")))
    with pytest.raises(ConfigError, match=r"\(data-parallel size, sequence-parallel size\) is allowed"):
        claims_of_pair((2, 2, 2))


def test_a_contradiction_is_one_error_with_every_source() -> None:
    claims = [
        Claim("tp", 2, "tensor_parallel.autotp_size"),
        Claim("dp_shard", 2, "x"),
        Claim("tp", 2, "y"),
        Claim("tp", 4, "ParallelismConfig.tp_size"),
    ]
    with pytest.raises(ConfigError) as error:
        solve(claims, 4)
    assert "\n- tensor_parallel.autotp_size: tp 2\n- y: tp 2\n- ParallelismConfig.tp_size: tp 4\n" in str(error.value)


def test_one_rank_in_so_many_words_contradicts_several() -> None:
    """What is switched on with one rank is said; what is off, or has no size, is not."""
    config = {"expert_parallel": {"enabled": True, "autoep_size": 1}, "pipeline": {"stages": 1}}
    for axis, key in (("ep", "expert_parallel.autoep_size"), ("pp", "pipeline.stages")):
        with pytest.raises(ConfigError, match=f"{key}: {axis} 1\n- DistributedConfig.{axis}_size: {axis} 2"):
            solve([*claims_of_config(config), Claim(axis, 2, f"DistributedConfig.{axis}_size")], 4)
    assert solve(claims_of_config(config), 4).dims == {"dp_shard": 4}
    for silent in ({"enabled": False, "autoep_size": 1}, {"enabled": True}, {"enabled": True, "autoep_size": "auto"}):
        assert claims_of_config({"expert_parallel": silent}) == []


@pytest.mark.parametrize(
    ("claims", "ranks", "text"),
    [
        ([("tp", 3)], 4, "3 ranks (pp x cp x sp x tp) are to share their samples; 1 or 2 or 4 would fit"),
        ([("dp_shard", 4), ("tp", 2)], 4, "dp_replicate 1 x dp_shard 4 x cp 1 x sp 1 x tp 2 makes 8 ranks; dp_shard 2 would fit"),
        ([("dp_shard", 2)], 4, "makes 2 ranks; dp_shard 4 would fit"),
        ([("dp_replicate", 3)], 4, "dp_replicate is 3; dp_replicate 1 or 2 or 4 would fit"),
        ([("shard group", 3)], 4, "shard groups of 3 do not divide 4 data-parallel ranks; shard group 1 or 2 or 4 would fit"),
        ([("shard group", 1), ("sp", 2)], 4, "shard group 2 or 4 would fit"),
        ([("shard group", 2), ("dp_replicate", 4)], 4, "dp_replicate 4 x shard group 2 makes 8 data-parallel ranks; shard group 1 would"),
        ([("dp", 4), ("sp", 2)], 4, "4 x 2 makes 8 ranks; dp 2 would fit"),
        ([("tp", 0)], 4, "source 0 is 0; a whole number from 1 on"),
        ([("cp", 2), ("pp", 2)], 4, "a pipeline of 2 stages and context parallelism (source 0: cp 2) cannot be combined"),
        ([("sp", 2), ("tp", 2)], 4, "source 1 is 2 and source 0 is 2, tensor and sequence parallelism: the two cannot be combined"),
    ],
)  # fmt: skip
def test_what_does_not_fit_shows_what_would(claims: list[tuple[str, int]], ranks: int, text: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError)) as error:
        solve([Claim(axis, size, f"source {number}") for number, (axis, size) in enumerate(claims)], ranks)
    assert text in str(error.value)


def test_what_would_fit_fits_the_nodes_too() -> None:
    """Nodes of 4 ranks of 12: a shard group of 3, or of 6, would lie in two of them."""
    for claim, fits in (
        (Claim("shard group", 5, "s"), "shard group 1 or 2 or 4 or 12"),
        (Claim("dp_replicate", 5, "s"), "dp_replicate 1 or 3 or 6 or 12"),
    ):
        with pytest.raises(ConfigError, match=f"; {fits} would fit"):
            solve([claim], 12, lambda size: 4 % size == 0 or size % 4 == 0)
