"""Constructors as users write them, inside ``zero.Init``: ``self.apply(init_weights)``, ``skip_init``, writes through ``.data``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from tests.support import ranks
from tests.support.parity import Run, initialize


class Gpt(nn.Module):
    """Initialises its layers at the end of its constructor; embedding and head are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.embedding.weight = self.head.weight
        self.scale = nn.Parameter(torch.ones(8))
        self.visited: list[str] = []
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        self.visited.append(type(module).__name__)
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.constant_(module.bias, 0.5 + (dist.get_rank() if dist.is_initialized() else 0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return functional.cross_entropy(self.head(x * self.scale).flatten(0, 1), tokens.flatten())


def _apply() -> None:
    import hf_zero

    torch.manual_seed(0)
    with hf_zero.zero.Init():
        model = Gpt()
    torch.manual_seed(0)
    plain = Gpt()
    assert model.visited == plain.visited
    assert all("apply" not in module.__dict__ for module in model.modules())
    with hf_zero.zero.GatheredParameters(list(model.parameters())):
        for layer in model.layers:
            assert torch.equal(layer.bias.detach(), torch.full((8,), 0.5)), "rank 0's values count"
        if ranks.rank() == 0:
            for (name, value), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(value, wanted), name
    engine = initialize(model, Run(3))
    engine.backward(engine(torch.arange(8).view(2, 4)))
    engine.step()


@pytest.mark.parametrize("world", [1, 2])
def test_apply_in_a_constructor_reaches_sharded_layers(world: int) -> None:
    ranks.run_ranks(_apply, world)


class Part(nn.Module):
    """A module that passes ``device`` on, as ``skip_init`` asks for."""

    def __init__(self, size: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size, device=device)
        self.more = nn.ModuleList([nn.Linear(size, size, device=device)])


class Skipping(nn.Module):
    """Layers that are made on the meta device and get memory afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = skip_init(nn.Linear, 8, 8)
        self.part = skip_init(Part, 8)


def _skip_init() -> None:
    import hf_zero

    with hf_zero.zero.Init():
        model = Skipping()
    for name, param in model.named_parameters():
        assert param.shape == torch.Size([0]) and param.ds_shape[-1] == 8 and not param.is_meta, name
        assert not name.endswith("weight") or param.ds_tensor.numel() == param.ds_numel // ranks.world(), name


@pytest.mark.parametrize("world", [1, 2])
def test_layers_made_by_skip_init_are_sharded(world: int) -> None:
    ranks.run_ranks(_skip_init, world)


class Parent(nn.Module):
    """Its constructor writes to its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(5))
        self.value.data = self.value.data + 1


class Child(Parent):
    """So does its subclass, to both."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(5))
        self.value.data, self.own.data = self.value.data + 1, self.own.data + 3


def _ancestry() -> None:
    import hf_zero

    with hf_zero.zero.Init():
        model = Child()
    assert [param.shape for param in model.parameters()] == [torch.Size([0])] * 2
    with hf_zero.zero.GatheredParameters(list(model.parameters(recurse=False))):
        assert model.value.tolist() == [3.0] * 5 and model.own.tolist() == [4.0] * 5


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_are_whole_until_the_last_constructor_returns(world: int) -> None:
    ranks.run_ranks(_ancestry, world)


class Writer(nn.Module):
    """Everything that constructors do to layers they have assigned already."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(self.first.weight.size(0), self.first.weight.shape[0] + len(self.first.bias))
        self.third = nn.Linear(self.second.weight.numel() // self.second.in_features, 4)
        self.second.weight.data.zero_()
        with torch.no_grad():
            self.second.weight[1].fill_(3.0)
            self.second.bias.copy_(torch.arange(16.0))
            self.first.weight[:, 0] = self.second.bias[:8]
            torch._foreach_mul_([self.first.weight, self.third.weight], 2.0)
        self.third.bias.data = self.third.bias.data + 1
        nn.init.trunc_normal_(self.third.weight, std=self.first.weight.std().item() + 0.1)
        self.attention = nn.MultiheadAttention(8, 2)
        nn.init.constant_(self.attention.out_proj.bias, 0.5)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16)
        self.third.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3))
        self.many = nn.ModuleList(nn.Linear(2, 2) for _ in range(12))
        biases = [layer.bias for layer in self.many]
        with torch.no_grad():  # in one call, too
            torch._foreach_zero_([layer.weight for layer in self.many])
            self.third.bias += torch.stack([layer.weight for layer in self.many]).sum() + torch.cat(biases).sum()
        for step in range(2):  # more at once than stay whole
            for bias in biases:
                bias.data.fill_(step + 1.0)


def _writes() -> None:
    import hf_zero

    torch.manual_seed(ranks.rank())
    with hf_zero.zero.Init():
        model = Writer()
        assert model.first.weight.shape == (8, 6) and model.first.weight.dtype == torch.float32
    assert all(param.shape == torch.Size([0]) for param in model.parameters())
    torch.manual_seed(ranks.rank())
    plain = Writer()
    with hf_zero.zero.GatheredParameters(list(model.parameters())):
        assert all(layer.bias.tolist() == [2.0, 2.0] for layer in model.many)
        assert not model.third.weight.requires_grad
        if ranks.rank() == 0:
            for (name, value), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(value, wanted), name


@pytest.mark.parametrize("world", [1, 2])
def test_constructors_write_to_layers_they_have_assigned(world: int) -> None:
    ranks.run_ranks(_writes, world)


def _alone() -> None:
    import hf_zero

    status = hf_zero.zero.ZeroParamStatus
    with hf_zero.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    weight = model[0].weight
    assert weight.ds_status is status.NOT_AVAILABLE and weight.numel() == 0 and weight.ds_shape == (4, 4)
    with hf_zero.zero.GatheredParameters([weight], modifier_rank=0):
        assert weight.ds_status is status.AVAILABLE and weight.dtype is torch.bfloat16
        with hf_zero.zero.GatheredParameters(model.parameters()):
            weight.data.fill_(3.0)
    assert weight.ds_status is status.NOT_AVAILABLE and weight.ds_tensor.tolist() == [3.0] * 16
    weight.all_gather()
    assert weight.tolist() == [[3.0] * 4] * 4
    weight.partition()
    assert weight.numel() == 0
    engine = initialize(model, Run(3, "bf16"))
    assert weight.shape == (4, 4) and weight.ds_status is status.AVAILABLE and bool((weight == 3).all())
    loss = engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum()
    engine.backward(loss)
    engine.step()
    assert not bool((hf_zero.utils.safe_get_full_fp32_param(weight) == 3).any()), "it trains"


def test_one_rank_is_its_own_owner() -> None:
    """Until ``initialize``, which has nothing to divide there."""
    ranks.run_ranks(_alone, 1)


def _broken_off() -> None:
    import hf_zero

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.layer.weight.data.zero_()
            raise ValueError("in the constructor")

    with pytest.raises(ValueError, match="in the constructor"), hf_zero.zero.Init():
        Broken()
    with hf_zero.zero.Init():
        layer = nn.Sequential(nn.Linear(4, 4))
    assert layer[0].weight.shape == torch.Size([0])
    with pytest.raises(hf_zero.errors.StateError, match=r"Linear\.weight is divided"):  # outside, where nothing is gathered
        layer[0].weight.data.zero_()


def test_a_constructor_that_fails_leaves_nothing_behind() -> None:
    ranks.run_ranks(_broken_off, 2)
