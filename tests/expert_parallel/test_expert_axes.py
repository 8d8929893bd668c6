"""Who holds which experts: sizes from every interface, what contradicts or does not fit, and what is not combined."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config.mesh import Claim, claims_of_config, solve
from hf_zero.core.units.marks import tp_shard_of
from hf_zero.errors import ConfigError, HfZeroError, StateError, UnsupportedError
from tests.support import parity, ranks, sequences, zoo
from tests.support.experts import ListedModel, build, with_experts
from tests.support.parity import Run
from tests.support.sequences import Data

MIXTRAL = "MixtralForCausalLM"


def test_the_mesh_divides_shard_groups_by_experts() -> None:
    said = claims_of_config({"expert_parallel": {"enabled": True, "autoep_size": "2"}})
    assert said == [Claim("ep", 2, "expert_parallel.autoep_size")]
    assert claims_of_config({"expert_parallel": {"enabled": False, "autoep_size": 2}}) == []
    mesh = solve(said, 4)
    assert (mesh.ep, mesh.replicas, mesh.dims) == (2, 4, {"dp_shard": 4}) and str(mesh).endswith(", ep 2")
    with pytest.raises(ConfigError, match="ep 3 does not divide the 4 ranks .* ep 1 or 2 or 4 would fit"):
        solve([Claim("ep", 3, "expert_parallel.autoep_size")], 4)
    with pytest.raises(ConfigError, match=r"autoep_size: ep 2\n- DistributedConfig.ep_size: ep 4"):
        solve([*said, Claim("ep", 4, "DistributedConfig.ep_size")], 4)
    split = solve([*said, Claim("tp", 2, "tensor_parallel.autotp_size")], 4)
    assert (split.ep, split.tp, split.replicas) == (2, 2, 2)
    with pytest.raises(ConfigError, match="ep 2 is no multiple of tp 4, or does not divide the 8 ranks .* ep 4 or 8 would fit"):
        solve([*said, Claim("tp", 4, "tensor_parallel.autotp_size")], 8)
    groups = solve([*said, Claim("dp_replicate", 2, "dp_replicate_size")], 4)
    assert (groups.ep, groups.dp_replicate, groups.dp_shard, groups.replicas) == (2, 2, 2, 4)
    with pytest.raises(ConfigError, match="ep 2 does not divide the 1 ranks that parameters are sharded over; ep 1 would fit"):
        solve([*said, Claim("dp_replicate", 4, "dp_replicate_size")], 4)


def test_typed_arguments(tmp_path: Path) -> None:
    from hf_zero.integrations.training_arguments import ZeroTrainingArguments

    arguments = ZeroTrainingArguments(output_dir=str(tmp_path), expert_parallel_size=1, report_to=[])
    assert "expert_parallel" not in arguments.deepspeed
    with pytest.raises(ConfigError, match="ep 2 does not divide the 1 ranks"):
        ZeroTrainingArguments(output_dir=str(tmp_path), expert_parallel_size=2, report_to=[])
    with pytest.raises(ConfigError, match="expert_parallel_size is 0"):
        ZeroTrainingArguments(output_dir=str(tmp_path), expert_parallel_size=0, report_to=[])


def test_wrong_input_and_combinations() -> None:
    ranks.run_ranks(check_refusals, 2)


class OwnStack(nn.Module):
    """Weights of experts in one tensor, multiplied by a forward that is not given indices."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, 8, 8))


def _experts(size: Any = 2, **section: Any) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, "autoep_size": size, **section}}


def check_refusals() -> None:
    def refused(kind: type[HfZeroError], text: str, model: nn.Module, extra: dict[str, Any], **arguments: Any) -> None:
        with pytest.raises(kind, match=text):
            parity.initialize(model, Run(extra=extra), **arguments)

    refused(ConfigError, "LlamaForCausalLM has no experts", zoo.build("LlamaForCausalLM"), _experts())
    refused(ConfigError, "does not divide the 3 experts of .*; 1, 3 would", build(MIXTRAL, {"num_local_experts": 3}), _experts())
    refused(ConfigError, "does not divide the 3 experts of layers.0", ListedModel(3), _experts())
    refused(ConfigError, "ep 4 does not divide the 2 ranks", build(MIXTRAL), _experts(4))
    refused(UnsupportedError, "experts are whole on their rank", build(MIXTRAL), _experts(expert_tensor_parallel_size=2))
    refused(UnsupportedError, "auxiliary loss balances", build(MIXTRAL), _experts(load_balance_coeff=0.1))
    refused(UnsupportedError, r"tokens cannot be sent to their experts", nn.Sequential(OwnStack(), nn.Linear(4, 4)), _experts())
    one_bit = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}}
    refused(UnsupportedError, "OneBitAdam with expert parallelism", build(MIXTRAL), {**_experts(), "optimizer": one_bit})
    _check_divided_once()


def _check_divided_once() -> None:
    model = build(MIXTRAL)
    engine = parity.initialize(model, with_experts(Run(1), 2))
    part = tp_shard_of(model.model.layers[0].mlp.experts.down_proj)
    assert (
        part is not None
        and part.expert
        and [(piece.start, piece.stop) for piece in part.ranges] == [(2 * ranks.rank(), 2 * ranks.rank() + 2)]
    )
    state = model.state_dict()
    experts = state["model.layers.0.mlp.experts.down_proj"]
    assert experts.shape == part.full_shape
    with pytest.raises(StateError, match="this rank's state dict has no values of it"):
        experts.numpy()
    model.load_state_dict(state)
    generated = model.generate(torch.full((1, 3), zoo.FIRST_TOKEN + ranks.rank()), max_new_tokens=3 + ranks.rank(), do_sample=False)
    assert generated.shape[1] > 3
    engine.destroy()
    with pytest.raises(StateError, match="divided over 2 ranks for an earlier engine, but this engine needs 1"):
        parity.initialize(model, Run(1))
    batch = zoo.batch(MIXTRAL, torch.Generator().manual_seed(9))
    assert torch.equal(zoo.loss(copy.deepcopy(model), batch), zoo.loss(model, batch))
    again = parity.initialize(model, with_experts(Run(3), 2))
    assert _loss(again) == _loss(parity.initialize(build(MIXTRAL), with_experts(Run(3), 2)))


def _loss(engine: Any) -> float:
    batch = zoo.batch(MIXTRAL, torch.Generator().manual_seed(ranks.rank()))
    return float(zoo.loss(engine, batch).detach())


@pytest.mark.slow  # fast: test_sequence_training.py, test_expert_training.py
def test_slices_of_sequences_share_experts() -> None:
    """Sequence parallelism over the same ranks, and over half of them."""
    ranks.run_ranks(check_slices, 2, 3)
    ranks.run_ranks(check_slices, 4, 1)


def check_slices(stage: int) -> None:
    run = with_experts(Run(stage, accumulation=2, clip=0.5), 2)
    expected = sequences.whole(sequences.mixtral, run, Data(prompt=3), ranks.world() // 2)
    sequences.compare(sequences.sliced(sequences.mixtral, run, Data(prompt=3), 2), expected, "slices of sequences share experts")


@pytest.mark.slow  # fast: test_pipeline_loading.py has one
def test_distributed_config_beside_a_deepspeed_configuration(tmp_path: Path) -> None:
    build(MIXTRAL).save_pretrained(tmp_path)
    ranks.run_ranks(check_distributed_config, 2, str(tmp_path))


def check_distributed_config(folder: str) -> None:
    from transformers import AutoModelForCausalLM, MixtralForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.integrations import HfDeepSpeedConfig

    config = Run(3).config()
    holder = HfDeepSpeedConfig(config)
    given = DistributedConfig(ep_size=2, fsdp_size=2, ep_plan={"model.layers.*.mlp.experts": "ep_dispatch_experts"})
    for source in (AutoModelForCausalLM, MixtralForCausalLM):
        model = source.from_pretrained(folder, distributed_config=given)
        engine = hf_zero.initialize(model=model, config=config, model_parameters=model.parameters())[0]
        assert engine.collectives.topology.expert.world == 2
        assert tp_shard_of(model.model.layers[0].mlp.experts.gate_up_proj).expert
        whole = engine._consolidated_16bit_state_dict()
        if ranks.rank() == 0:
            wanted = build(MIXTRAL).state_dict()
            assert whole.keys() == wanted.keys() and all(torch.equal(value, wanted[name]) for name, value in whole.items())
        engine.destroy()
    with pytest.raises(ConfigError, match="ep_plan names 'model.layers.*.moe'"):
        AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(ep_size=2, fsdp_size=2, ep_plan={"model.layers.*.moe": "ep_dispatch_experts"})
        )
    with pytest.raises(UnsupportedError, match="ep_implementation is 'all_reduce'"):
        AutoModelForCausalLM.from_pretrained(folder, distributed_config={"ep_size": 2, "fsdp_size": 2, "ep_implementation": "all_reduce"})
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=given)
    with pytest.raises(ConfigError, match="DistributedConfig.ep_size: ep 2"):
        hf_zero.initialize(
            model=model, config={**config, **_experts(1, enabled=True), "expert_parallel": {"enabled": True, "autoep_size": 4}}
        )
    del holder


def test_whole_weights_for_an_inference_engine() -> None:
    ranks.run_ranks(check_stream, 2)


def check_stream() -> None:
    """``iter_full_params`` gives all experts on every rank."""
    from hf_zero.utils import iter_full_params

    engine, wanted = parity.initialize(build(MIXTRAL), with_experts(Run(3), 2)), build(MIXTRAL).state_dict()
    found = dict(iter_full_params(engine, merge_adapters=False))
    assert found.keys() == {name for name in wanted if name in found} and any("experts" in name for name in found)
    assert all(torch.equal(value.cpu(), wanted[name]) for name, value in found.items())
    engine.destroy()
