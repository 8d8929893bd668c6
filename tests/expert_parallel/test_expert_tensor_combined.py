"""Experts beside split layers, together with what else rests, travels or is shared in another way; each against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hf_zero.core.units.marks import tp_shard_of
from hf_zero.errors import UnsupportedError
from tests.support import parity, ranks, zoo
from tests.support import zeropp_reference as zeropp
from tests.support.experts import alike, build, check_experts, mixed, with_experts, with_split_layers
from tests.support.parity import DTYPES, LIMITS, Run

MIXTRAL, QWEN = "MixtralForCausalLM", "Qwen3MoeForCausalLM"
TP = 2


def check_both(name: str, run: Run, ep: int) -> None:
    check_experts(name, with_split_layers(run, TP), ep, alike(mixed(name), TP))


@pytest.mark.slow
def test_states_and_parameters_in_files(tmp_path: Path) -> None:
    ranks.run_ranks(check_files, 4, str(tmp_path))


def check_files(folder: str) -> None:
    file = {"device": "nvme", "nvme_path": folder}
    check_both(QWEN, Run(1, accumulation=2, extra={"zero_optimization": {"offload_optimizer": file}}), 4)
    check_both(MIXTRAL, Run(3, clip=0.1, extra={"zero_optimization": {"offload_optimizer": file, "offload_param": file}}), 2)


@pytest.mark.slow
def test_copies_in_the_node() -> None:
    ranks.run_ranks(check_copies, 8, env={"LOCAL_WORLD_SIZE": "4"})


def check_copies() -> None:
    """Of everything but experts, for a step or for good."""
    check_both(MIXTRAL, Run(3, clip=0.1, extra={"zero_optimization": {"zero_hpz_partition_size": 2}}), 4)
    check_both(MIXTRAL, Run(3, accumulation=2, extra={"hf_zero": {"param_shard_size": 2}}), 2)


# ------------------------------------------------------------------------------------------------ ZeRO++


@pytest.mark.slow  # `test_expert_combined.py` has codes beside experts, `test_parity_zeropp.py` codes
def test_codes_of_split_layers() -> None:
    ranks.run_ranks(check_codes, 4)


def check_codes() -> None:
    """Each part of a split layer is coded where it is, what all hold alike in the same way on all, experts not at all."""
    weights = {"zero_quantized_weights": True}
    for dtype, keys in (("fp32", weights), ("bf16", {**weights, "zero_quantized_gradients": True})):
        run = with_experts(with_split_layers(Run(3, dtype=dtype, extra={"zero_optimization": keys}), TP), 2)
        model = build(MIXTRAL)
        engine = parity.initialize(model, run)
        dims = {name: part.dim for name, param in model.named_parameters() if (part := tp_shard_of(param)) and not part.expert}
        trace = parity.train(engine, alike(mixed(MIXTRAL), TP), zoo.loss, run)
        places = [
            (unit.layout.padded_numel, [(slot.name, slot.offset, slot.numel) for slot in unit.layout.slots])
            for unit in engine.units
            if not unit.collectives.topology.of_experts
        ]
        _check_alike({name: value for name, value in parity.full_masters(engine).items() if name not in dims})
        engine.destroy()
        if ranks.rank() == 0:
            _check_codes(trace, places, dims, run, "zero_quantized_gradients" in keys)


def _check_alike(masters: dict[str, Tensor]) -> None:
    """The ranks of a model axis have the same bits of what they do not split."""
    everyone: list[Any] = [None] * ranks.world()
    dist.all_gather_object(everyone, masters)
    for other in everyone[1:]:
        assert all(torch.equal(value, other[name]) for name, value in everyone[0].items())


class Joined(nn.Module):
    """A weight made of the parts of a model axis."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, self.dim)

    def right_inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        return whole.chunk(TP, self.dim)


def _check_codes(trace: parity.Trace, places: zeropp.Places, dims: dict[str, int], run: Run, gradients: bool) -> None:
    """Against one process whose split weights are joined from parts, each of which is a parameter of its own."""
    whole = build(MIXTRAL)
    for name, dim in dims.items():
        path, _, leaf = name.rpartition(".")
        parametrize.register_parametrization(whole.get_submodule(path), leaf, Joined(dim))
    parts = {name: [f"{name.rpartition('.')[0]}.parametrizations.weight.original{part}" for part in range(TP)] for name in dims}
    coded: zeropp.Places = []
    for numel, slots in places:
        split = {name in dims for name, _, _ in slots}
        assert len(split) == 1  # or copies of what is not split would be coded beside parts that differ
        coded += [
            (numel, [(parts[name][part] if name in dims else name, *at) for name, *at in slots]) for part in range(TP if any(split) else 1)
        ]
    experts = [(param.numel(), [(name, 0, param.numel())]) for name, param in whole.named_parameters() if "experts" in name]
    plain = frozenset(range(len(coded), len(coded) + len(experts)))
    settings = zeropp.Settings(ranks.world() // TP, run.steps, True, gradients, dtype=DTYPES[run.dtype], plain=plain)
    wanted = zeropp.run(whole, lambda model, *of: zoo.loss(model, mixed(MIXTRAL)(*of)), settings, [*coded, *experts])
    # In bf16 products of split layers are rounded before they are added up, which moves some gradients to the next of their 15 codes.
    loss, norm = (LIMITS["fp32"].loss, LIMITS["fp32"].norm) if run.dtype == "fp32" else (2e-3, 2e-2)
    assert trace.losses == pytest.approx(wanted.losses, rel=loss)
    assert trace.norms == pytest.approx(wanted.norms, rel=norm)
    masters = {name: torch.cat([wanted.masters[part] for part in parts[name]], dims[name]) for name in dims}
    masters |= {name: value for name, value in wanted.masters.items() if "parametrizations" not in name}
    assert masters.keys() == trace.masters.keys()
    if run.dtype == "fp32":
        for name, value in masters.items():
            torch.testing.assert_close(trace.masters[name], value, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


# ------------------------------------------------------------------------------------------------ refused


def test_refused() -> None:
    ranks.run_ranks(check_refused, 4)


def check_refused() -> None:
    def refused(text: str, model: nn.Module, **extra: Any) -> None:
        with pytest.raises(UnsupportedError, match=text):
            parity.initialize(model, with_experts(with_split_layers(Run(1, extra=extra), TP), 2))

    refused("optimizer Lamb with tensor parallelism is not provided", build(MIXTRAL), optimizer={"type": "Lamb", "params": {"lr": 1e-2}})
    one_bit = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}}
    refused("OneBitAdam with tensor parallelism .* is not provided", build(MIXTRAL), optimizer=one_bit)
    refused("sequence parallelism", build(MIXTRAL), sequence_parallel_size=2)
    copied = zoo.build("LlamaForCausalLM", changes={"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4})
    coded = Run(3, extra={"zero_optimization": {"zero_quantized_weights": True}})
    with pytest.raises(UnsupportedError, match="over more ranks than a layer has heads for keys and values is not supported"):
        parity.initialize(copied, with_split_layers(coded, 4))
