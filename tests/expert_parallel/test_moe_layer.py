"""DeepSpeed's own layer of experts, its gate, and training with both against plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import top1gating, top2gating, topkgating
from deepspeed.moe.utils import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_into_different_moe_groups_for_optimizer,
)
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from tests.support import parity, ranks
from tests.support.models import Batch
from tests.support.parity import Run, check_bitwise, check_training

WIDTH, LABELS = 8, 5


class Classifier(nn.Module):
    """Two layers of experts between linear ones; the second beside a dense path, with another number of experts."""

    def __init__(self, ep_size: int, k: int = 1, **gate: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.moe_1 = MoE(WIDTH, expert, num_experts=4, ep_size=ep_size, k=k, min_capacity=0, **gate)
        residual = nn.Linear(WIDTH, WIDTH)
        self.moe_2 = MoE(WIDTH, residual, num_experts=8, ep_size=ep_size, k=k, use_residual=True, min_capacity=0, **gate)
        self.last = nn.Linear(WIDTH, LABELS)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, balance_1, _ = self.moe_1(self.first(tokens))
        hidden, balance_2, counts = self.moe_2(hidden)
        assert counts.sum() == labels.numel() * self.moe_2.deepspeed_moe.gate.k
        loss = nn.functional.cross_entropy(self.last(hidden).flatten(0, 1).float(), labels.flatten())
        return loss + 0.1 * (balance_1 + balance_2)


def build(ep_size: int, **gate: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Classifier(ep_size, **gate)
        for parameter in model.parameters():
            nn.init.normal_(parameter)  # experts begin alike, which would hide whom a token comes to
    return model


def feed(step: int, micro: int, rank: int) -> Batch:
    """Of the tokens of rank 1 all are alike: those of most experts come from the others."""
    generator = torch.Generator().manual_seed(1 + step + 10 * micro + 100 * rank)
    tokens = torch.randn(2, 6, WIDTH, generator=generator)
    return {
        "tokens": tokens[:1, :1].expand_as(tokens) if rank == 1 else tokens,
        "labels": torch.randint(LABELS, (2, 6), generator=generator),
    }


def forward(model: Any, batch: Batch) -> Any:
    return model(**batch)


def check(ep_size: int, run: Run, **gate: Any) -> parity.Trace:
    label = f"MoE over {ep_size} of {ranks.world()} ranks, {gate}"
    return check_training(lambda: build(ep_size, use_rts=False, top2_2nd_expert_sampling=False, **gate), feed, forward, run, label=label)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_stage_trains_as_plain_pytorch(tmp_path: Path, every: bool) -> None:
    ranks.run_ranks(check_two, 2, tmp_path, every)


def check_two(folder: Path, every: bool) -> None:
    traces = {stage: check(2, Run(stage, accumulation=2, clip=0.1)) for stage in ((0, 1, 2, 3) if every else (1, 3))}
    for stage in traces.keys() & {1, 2}:
        check_bitwise(traces[3], traces[stage], f"MoE: stage 3 against {stage}")
    if every:
        check(1, Run(3))
    check(2, Run(2), k=2)
    check(2, Run(1), k=3, drop_tokens=False)
    check(2, Run(2, dtype="fp16"), noisy_gate_policy="None")
    check_own_experts()
    check_elastic(folder)
    check_refused_sizes()


def check_own_experts() -> None:
    """A rank sees its own experts; a dict of one rank's is taken for those."""
    one, two = build(1), build(2)
    here, state = 2 * ranks.rank(), one.state_dict()
    own = {
        name: value
        for name, value in state.items()
        if "moe_2.deepspeed_moe.experts" not in name and "moe_1.deepspeed_moe.experts" not in name
    }
    for layer, each in (("moe_1", 2), ("moe_2", 4)):
        start = f"{layer}.deepspeed_moe.experts.deepspeed_experts."
        for number in range(each):
            from_all = f"{start}{ranks.rank() * each + number}."
            own |= {f"{start}{number}.{name[len(from_all) :]}": value * 2 for name, value in state.items() if name.startswith(from_all)}
    two.load_state_dict(own)
    engine = parity.initialize(two, Run(2))
    assert engine.has_moe_layers is True and engine.num_experts == [4, 8]
    experts = two.moe_1.deepspeed_moe.experts.deepspeed_experts
    assert len(experts) == 2 and len(list(experts)) == 2 and len(list(experts.children())) == 4
    weight = deepspeed.utils.safe_get_full_fp32_param(experts[0][0].weight)
    assert torch.equal(weight, 2 * state[f"moe_1.deepspeed_moe.experts.deepspeed_experts.{here}.0.weight"])
    for name, param in [*two.named_parameters(), (f"own expert {here}", experts[0][0].weight)]:  # no rank has what one rank lacks
        assert deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg") is None, name
        assert deepspeed.utils.safe_get_full_grad(param) is None, name
        with pytest.raises(StateError, match="there is no optimizer state 'exp_avg'"):
            deepspeed.utils.safe_set_full_optimizer_state(param, torch.zeros(param.shape), "exp_avg")
    batch = feed(0, 0, ranks.rank())
    engine.backward(engine(**batch))
    grads = deepspeed.utils.safe_get_full_grad(experts[1][0].weight)
    assert grads.shape == (2 * WIDTH, WIDTH)
    for name, param in two.named_parameters():
        assert torch.equal(
            deepspeed.utils.safe_get_full_fp32_param(param), state[name] * (2 if ".experts." in name and "moe_" in name else 1)
        )
        if name == f"moe_1.deepspeed_moe.experts.deepspeed_experts.{here + 1}.0.weight":
            assert param is experts[1][0].weight
        if "deepspeed_experts." in name:
            assert deepspeed.utils.safe_get_full_grad(param).shape == state[name].shape
    with pytest.raises(StateError, match="the ranks read parameters of different experts"):
        names = [f"moe_1.deepspeed_moe.experts.deepspeed_experts.{number}.0.weight" for number in (0, 1)]
        deepspeed.utils.safe_get_full_fp32_param(two.get_parameter(names[ranks.rank()]))
    engine.destroy()


def check_elastic(folder: Path) -> None:
    """What was trained with divided experts goes on without, or divided again: weights and moments."""
    run = Run(2)
    engine = parity.initialize(build(2, use_rts=False), run)
    parity.train(engine, feed, forward, run)
    engine.save_checkpoint(str(folder))
    expected, moments = dict(hf_zero.utils.iter_full_params(engine)), _moments(engine)
    assert any("experts" in name and value.any() for name, value in moments.items())
    for size in (1, 2):
        other = parity.initialize(build(size, use_rts=False), run)
        other.load_checkpoint(str(folder))
        for found, wanted in ((dict(hf_zero.utils.iter_full_params(other)), expected), (_moments(other), moments)):
            assert found.keys() == wanted.keys()
            for name, value in found.items():
                assert torch.equal(value, wanted[name]), (size, name)
        other.destroy()
    engine.destroy()


def _moments(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            value = deepspeed.utils.safe_get_full_optimizer_state(param, key)
            assert value is not None, (name, key)
            found[f"{name} {key}"] = value
    return found


def check_refused_sizes() -> None:
    with pytest.raises(ConfigError, match=r"MoE\(ep_size=4\): ep 4"):
        parity.initialize(build(4), Run(1))
    own = nn.Linear(2, 2)
    vars(own.weight).update(allreduce=False, group_name="mine")
    with pytest.raises(UnsupportedError, match=r"parameter weight is marked allreduce=False \(group_name 'mine'\): its values differ"):
        parity.initialize(own, Run(2))


@pytest.mark.slow
def test_on_four_ranks() -> None:
    ranks.run_ranks(check_four, 4)


def check_four() -> None:
    check(2, Run(2, accumulation=2, clip=0.1), k=2)
    check(4, Run(3))
    check(4, Run(0))


def test_layer_alone_drops_what_is_above_the_capacity() -> None:
    torch.manual_seed(0)
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, k=1, capacity_factor=1.0, min_capacity=0, use_rts=False)
    tokens = torch.randn(1, 8, WIDTH)[:, :1].expand(1, 8, WIDTH)  # all choose one expert, which takes 8 / 4
    output, balance, counts = layer(tokens)
    assert counts.sum() == 8 and counts.max() == 8 and balance.dim() == 0
    assert (output[0].abs().sum(dim=-1) > 0).sum() == 2
    layer.deepspeed_moe.gate.eval_capacity_factor = 4.0
    assert (layer.eval()(tokens)[0].abs().sum(dim=-1) > 0).all()
    assert torch.equal(layer(tokens, torch.zeros(8))[0], torch.zeros(1, 8, WIDTH))  # no token is used


def test_gates_as_tables() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.9], [0.0, 3.0, 1.0], [1.0, 0.0, 3.0], [0.0, 1.0, 4.0]])
    loss, weights, sent, counts = top1gating(logits, 1.0, 0, use_rts=False)
    gates = logits.softmax(dim=1)
    assert counts.tolist() == [0, 1, 3] and weights.shape == (4, 3, 2)  # 4 tokens / 3 experts, rounded up
    assert sent.sum(dim=(0, 2)).tolist() == [0, 1, 2] and sent.sum(dim=(1, 2)).max() == 1  # one of three is dropped
    torch.testing.assert_close(weights[1, 1, 0], gates[1, 1])
    torch.testing.assert_close(loss, (gates.mean(dim=0) * torch.tensor([0.0, 0.25, 0.75])).sum() * 3)

    _, weights, sent, counts = top2gating(logits, 0.5, 0, top2_2nd_expert_sampling=False)
    assert counts.tolist() == [1, 3, 4]
    assert sent.nonzero().tolist() == [[0, 1, 1], [0, 2, 0], [1, 1, 0], [2, 0, 0], [2, 2, 1]]  # second choices come behind first ones
    torch.testing.assert_close(weights.sum(dim=(1, 2)), torch.tensor([1.0, 1.0, 1.0, 0.0]))

    for policy, kept in (("probs", [2, 3]), ("position", [0, 2])):
        sent = topkgating(logits, 1, 1.0, 0, drop_policy=policy)[2]
        assert sent[:, 2].any(dim=1).nonzero().flatten().tolist() == kept
    everyone = topkgating(logits, 3, 1.0, 0, drop_tokens=False)[2]
    assert everyone.shape == (4, 3, 4) and everyone.sum() == 12
    with pytest.raises(ConfigError, match="drop_policy is 'last'"):
        topkgating(logits, 1, 1.0, 0, drop_policy="last")


def test_capacity_without_drops_is_that_of_the_fullest_rank() -> None:
    ranks.run_ranks(check_capacity, 2)


def check_capacity() -> None:
    logits = torch.zeros(3 + 4 * ranks.rank(), 2)
    logits[:, 0] = 1.0  # all to expert 0
    assert top1gating(logits, 1.0, 0, drop_tokens=False, ep_group=dist.group.WORLD)[1].shape == (len(logits), 2, 7)
    assert top1gating(logits, 1.0, 0, drop_tokens=False)[1].shape == (len(logits), 2, len(logits))


def test_param_groups_of_experts() -> None:
    model = Classifier(ep_size=2)
    assert has_moe_layers(model) == (True, 4) and has_moe_layers(nn.Linear(2, 2)) == (False, 0)
    dense, experts = split_params_into_different_moe_groups_for_optimizer({"params": model.parameters(), "name": "all", "lr": 0.5})
    assert is_moe_param_group(experts) and not is_moe_param_group(dense)
    assert experts["name"] == "ep_size_2" and experts["lr"] == 0.5 and all(map(is_moe_param, experts["params"]))
    assert len(dense["params"]) + len(experts["params"]) == len(list(model.parameters()))
    assert len(configure_moe_param_groups(list(model.parameters()))) == 2
    assert configure_moe_param_groups([dense, experts]) == [dense, experts]
    (plain,) = split_params_into_different_moe_groups_for_optimizer([{"params": nn.Linear(2, 2).parameters(), "name": "plain"}])
    assert len(plain["params"]) == 2
    assert has_moe_layers(copy.deepcopy(model)) == (True, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_experts": 6, "ep_size": 4}, ConfigError, "1, 2, 3, 6 would fit"),
        ({"num_experts": 2, "k": 3}, ConfigError, "a token has 1 to 2 experts"),
        ({"num_experts": 2, "noisy_gate_policy": "Jiter"}, ConfigError, "'Jitter' and 'RSample'"),
        ({"num_experts": 2, "enable_expert_tensor_parallelism": True}, UnsupportedError, "whole experts are then divided"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        MoE(WIDTH, nn.Linear(WIDTH, WIDTH), **arguments)
