"""Layers and losses tile by tile: losses, gradients and weights of the same model computed at once, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import hf_zero
from hf_zero.errors import ConfigError
from hf_zero.sequence_parallel.tiled import SequenceTiledCompute, TiledFusedLogitsLoss, TiledLoss, TiledMLP, sequence_tiled_compute
from tests.support import ranks

LENGTH, STEPS = 13, 3  # a length that no number of tiles divides
_plain_mlp = modeling_llama.LlamaMLP.forward


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes))


def _mlp_in_tiles(self: Any, x: torch.Tensor) -> torch.Tensor:
    return TiledMLP.apply(_plain_mlp, self, x, 4, [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight])


def _mlp_in_general_tiles(self: Any, x: torch.Tensor) -> torch.Tensor:
    params = [self.down_proj.weight]
    return sequence_tiled_compute(_plain_mlp, x.shape[1], 4, {"x": x}, {"self": self}, "x", params, 1, None)


def _mlp_as_autograd_has_it(self: Any, x: torch.Tensor) -> torch.Tensor:
    return SequenceTiledCompute.apply(_plain_mlp, x.shape[1], 4, ["x"], ["self"], "x", 0, None, 1, None, x, self)


def _sum_of_tile(model: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model.lm_head(hidden).view(-1, model.config.vocab_size)
    return functional.cross_entropy(logits.float(), targets.view(-1), reduction="sum")


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 40, (2, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + rank))


def _tiled_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Outside the model's own forward, as trainers do it: the base model first, its head in the loss."""
    hidden = model.model(input_ids=tokens[:, :-1]).last_hidden_state
    total = TiledFusedLogitsLoss.apply(_sum_of_tile, model, hidden, tokens[:, 1:], None, 3, [model.lm_head.weight], "sum")
    return total / tokens[:, 1:].numel()


def _reference(world: int) -> tuple[list[float], list[torch.Tensor]]:
    model = _llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        tokens = torch.cat([_batch(step, rank) for rank in range(world)])
        loss = functional.cross_entropy(model(input_ids=tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [param.detach() for param in model.parameters()]


class _WithLoss(nn.Module):
    """The loss inside the forward that the engine wraps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return _tiled_loss(self.inner, tokens)


def _trains() -> None:
    expected_losses, expected = _reference(ranks.world())
    ways = (_mlp_in_tiles, _mlp_in_general_tiles, _mlp_as_autograd_has_it)
    for stage, inside in ((0, True), (1, False), (2, True), (3, True), (3, False)):
        modeling_llama.LlamaMLP.forward = ways[stage % 3]  # type: ignore[method-assign]
        try:
            model = _WithLoss(_llama()) if inside else _llama()
            zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
            optimizer = {"type": "SGD", "params": {"lr": 0.5}}
            config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "optimizer": optimizer, "zero_optimization": zero}
            engine = hf_zero.initialize(model=model, config=config)[0]
            losses = []
            for step in range(STEPS):
                tokens = _batch(step, ranks.rank())
                loss = engine(tokens) if inside else _tiled_loss(engine.module, tokens)
                engine.backward(loss)
                mean = loss.detach().clone()
                torch.distributed.all_reduce(mean)
                losses.append(float(mean) / ranks.world())
                engine.step()
            weights = [hf_zero.utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
            engine.destroy()
        finally:
            modeling_llama.LlamaMLP.forward = _plain_mlp  # type: ignore[method-assign]
        torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=2e-6)


def test_tiles_train_as_the_whole() -> None:
    ranks.run_ranks(_trains, 2)


@pytest.mark.quick
def test_no_whole_logits_are_made() -> None:
    """The widest thing that exists is a tile of them, in forward and in backward."""
    widest = []
    head = nn.Linear(8, 1000)
    hidden, targets = torch.randn(2, 12, 8, requires_grad=True), torch.randint(0, 1000, (2, 12))

    def loss(layer: nn.Linear, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = layer(x)
        widest.append(logits.numel())
        if logits.requires_grad:
            logits.register_hook(lambda grad: widest.append(grad.numel()))
        return (functional.cross_entropy(logits.view(-1, 1000), y.view(-1), reduction="none") * mask.view(-1)).sum()

    mask = (torch.arange(24).view(2, 12) % 5 > 0).float()
    value = TiledFusedLogitsLoss.apply(loss, head, hidden, targets, mask, 4, None, "sum")
    value.backward()
    assert set(widest) == {2 * 3 * 1000} and len(widest) == 3 * 4
    tiled = [hidden.grad, head.weight.grad, head.bias.grad]
    hidden.grad = head.weight.grad = head.bias.grad = None
    whole = loss(head, hidden, targets, mask)
    whole.backward()
    torch.testing.assert_close(value, whole)
    torch.testing.assert_close(tiled, [hidden.grad, head.weight.grad, head.bias.grad])
    with torch.no_grad():
        assert not TiledFusedLogitsLoss.apply(loss, head, hidden, targets, mask, 4, None, "sum").requires_grad


@pytest.mark.quick
def test_what_does_not_fit_is_told() -> None:
    x, y = torch.zeros(2, 4, 3), torch.zeros(2, 5)
    with pytest.raises(ConfigError, match=r"x has shape \(2, 4, 3\) and y \(2, 5\)"):
        TiledFusedLogitsLoss.apply(lambda *_: x.sum(), None, x, y, None, 2)
    with pytest.raises(ConfigError, match="output_reduction is 'max'; allowed: mean, sum"):
        TiledFusedLogitsLoss.apply(lambda *_: x.sum(), None, x, y, None, 2, None, "max")
    with pytest.raises(ConfigError, match="shards is 0"):
        TiledMLP.apply(lambda _, tile: tile, None, x, 0)
    with pytest.raises(ConfigError, match=r"x has shape \(2, 4, 3\); dimension 1 must have seqlen 5"):
        sequence_tiled_compute(lambda x: x, 5, 2, {"x": x}, {}, "x")
    with pytest.raises(ConfigError, match="grad_requiring_tensor_key is 'z'; allowed: x"):
        sequence_tiled_compute(lambda x: x, 4, 2, {"x": x}, {}, "z")
    means = sequence_tiled_compute(lambda x: x.mean(), 4, 2, {"x": torch.arange(8.0).view(2, 4)}, {}, "x", None, 0, "mean")
    assert float(means) == 3.5


@pytest.mark.parametrize("labels", [[1, 2, 3, 4, -100, -100, -100], [1, 2, -100, 4, 5, -100, 6], [1, 2, 3, 4, 5, 6, 0], [-100] * 7])
def test_tiles_of_a_loss_count_as_many_labels_as_they_have(labels: list[int]) -> None:
    def mean(logits: torch.Tensor, labels: None, vocab_size: int, shift_labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.reshape(-1, vocab_size), shift_labels.reshape(-1))

    targets = torch.tensor([labels])
    tiled = torch.randn(1, 7, 9, dtype=torch.float64, requires_grad=True)
    whole = tiled.detach().clone().requires_grad_()
    value = TiledLoss.apply(mean, tiled, 9, targets, 3)
    value.backward()
    if (targets == -100).all():
        assert value == 0 and not tiled.grad.any()
        return
    expected = mean(whole, None, 9, targets)
    expected.backward()
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(tiled.grad, whole.grad, rtol=1e-13, atol=1e-16)
    assert not tiled.grad[targets == -100].any()
    with pytest.raises(ConfigError, match="shift_labels"):
        TiledLoss.apply(mean, tiled, 9, targets[:, 1:], 3)
