"""The host optimizers against torch's classes of the same name, and as what the engine trains with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_zero.ops import HostAdagrad, HostAdam, HostLion, HostSGD, host_optimizers
from hf_zero.optim.elementwise import needs_whole_tensors
from hf_zero.optim.lion import Lion
from tests.native.libraries import ISAS, TORCH_ADAM_ROUNDS_ALIKE, same_bits

SHAPES = [(4, 16), (32,), (3, 5), (0,), ()]
PAIRS: list[tuple[type, type, dict[str, Any], dict[str, Any]]] = [
    (HostAdam, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}, {"fused": True}),
    (HostLion, Lion, {"lr": 1e-2, "weight_decay": 0.1}, {}),
    (
        HostAdagrad,
        torch.optim.Adagrad,
        {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
        {"fused": True},
    ),
    (HostSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2}, {"fused": True}),
    (HostSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, {"fused": True}),
]


@pytest.mark.parametrize(("ours", "theirs", "options", "more"), PAIRS)
def test_numbers_and_states_are_torchs(ours: type, theirs: type, options: dict[str, Any], more: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    first = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    second = [torch.nn.Parameter(param.detach().clone()) for param in first]
    one, other = ours(first, **options), theirs(second, **options, **more)
    for _ in range(4):
        for left, right in zip(first, second, strict=True):
            left.grad = torch.randn(left.shape, generator=generator)
            right.grad = left.grad.clone()
        one.step()
        other.step()
    for index, (left, right) in enumerate(zip(first, second, strict=True)):
        # Whole vectors; the others end in part of one, where torch's fused loops round otherwise. So does our torch reference of Adagrad.
        if index < 2 and (TORCH_ADAM_ROUNDS_ALIKE if ours is HostAdam else ISAS or ours is not HostAdagrad):
            assert same_bits(left.detach(), right.detach())
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)
        assert one.state[left].keys() == other.state[right].keys()


@pytest.mark.parametrize(("ours", "theirs", "options", "more"), PAIRS)
def test_every_one_is_elementwise_and_steps_a_subset(ours: type, theirs: type, options: dict[str, Any], more: dict[str, Any]) -> None:
    class Subclass(ours):  # type: ignore[misc, valid-type]  # the exact classes are known; a subclass is probed
        pass

    param = torch.nn.Parameter(torch.randn(40))
    assert not needs_whole_tensors(ours([param], **options))
    assert not needs_whole_tensors(Subclass([param], **options))
    twin = torch.nn.Parameter(param.detach().clone())
    grad, low = torch.randn(40).bfloat16(), torch.zeros(40, dtype=torch.bfloat16)
    optimizer, plain = ours([param], **options), ours([twin], **options)
    optimizer.update([param], [grad], [low], grad_factor=0.5)
    twin.grad = grad.float() * 0.5
    plain.step()
    assert same_bits(param.detach(), twin.detach()) and same_bits(low, param.detach().bfloat16())


@pytest.mark.parametrize(("kind", "wrong", "message"), [
    (HostAdagrad, {"lr_decay": -1.0}, "lr_decay is -1.0"),
    (HostSGD, {"momentum": -0.5}, "momentum is -0.5"),
    (HostSGD, {"nesterov": True, "dampening": 0.5}, "nesterov needs"),
    (HostLion, {"betas": (0.9, 1.0)}, "betas is"),
    (HostLion, {"moment_dtype": torch.float16}, "moment_dtype is"),
])  # fmt: skip
def test_wrong_hyperparameters_are_refused(kind: type, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind([torch.nn.Parameter(torch.zeros(2))], **wrong)


def test_groups_that_maximise_go_up() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = HostAdam([{"params": [param], "maximize": True}], lr=0.5)
    param.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.5))


def test_sparse_gradients_are_refused() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match=r"HostSGD got a sparse gradient for a parameter of shape \(4, 2\)"):
        HostSGD(table.parameters()).step()
    with pytest.raises(NotImplementedError, match="HostAdagrad got a sparse gradient"):
        HostAdagrad(table.parameters(), weight_decay=0.1).step()


def test_adagrad_takes_sparse_gradients_as_torchs_does() -> None:
    first = torch.nn.Embedding(6, 3, sparse=True)
    second = torch.nn.Embedding.from_pretrained(first.weight.detach().clone(), freeze=False, sparse=True)
    one, other = HostAdagrad(first.parameters(), lr=0.1), torch.optim.Adagrad(second.parameters(), lr=0.1)
    for rows in ([1, 4, 1], [4, 5, 0]):
        for table, optimizer in ((first, one), (second, other)):
            optimizer.zero_grad()
            (table(torch.tensor(rows)) * torch.arange(3.0)).sum().backward()
            optimizer.step()
    torch.testing.assert_close(first.weight, second.weight)
    torch.testing.assert_close(one.state[first.weight]["sum"], other.state[second.weight]["sum"])


# --- parameters in 16 bit ---


@pytest.mark.parametrize("kind", [HostAdam, HostLion, HostSGD, HostAdagrad])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_parameter_in_16_bit_is_widened_a_piece_at_a_time(kind: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    start, grads = torch.randn(7, 30).to(dtype), torch.randn(3, 7, 30).to(dtype)
    found = []
    for piece in (1 << 22, 64):
        monkeypatch.setattr(host_optimizers, "_PIECE", piece)
        param = torch.nn.Parameter(start.clone())
        low = torch.zeros(start.shape, dtype=torch.bfloat16)
        optimizer = kind([param], lr=0.1)
        for grad in grads:
            optimizer.update([param], [grad], [low], grad_factor=0.5)
        assert all(value.dtype == torch.float32 for value in optimizer.state[param].values())
        found.append([param.detach(), low, *optimizer.state[param].values()])
    assert all(torch.equal(whole, pieces) for whole, pieces in zip(*found, strict=True))
    assert not torch.equal(found[0][0], start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lion_keeps_its_momentum_in_bf16_where_it_is_told_to(dtype: torch.dtype) -> None:
    start, grads = torch.randn(7, 30).to(dtype), torch.randn(3, 7, 30).to(dtype)
    param = torch.nn.Parameter(start.clone())
    optimizer = HostLion([param], lr=0.1, weight_decay=0.1, moment_dtype=torch.bfloat16)
    value, momentum = start.clone(), torch.zeros(7, 30, dtype=torch.bfloat16)
    for grad in grads:
        optimizer.update([param], [grad])
        step = torch.nn.Parameter(value.float())
        wide = Lion([step], lr=0.1, weight_decay=0.1, betas=(0.9, 0.999))
        wide.state[step]["exp_avg"] = momentum.float()
        step.grad = grad.float()
        wide.step()
        value, momentum = step.detach().to(dtype), wide.state[step]["exp_avg"].bfloat16()
    found = optimizer.state[param]["exp_avg"]
    assert found.dtype == torch.bfloat16 and torch.equal(found, momentum)
    assert torch.equal(param.detach(), value) and not torch.equal(value, start)


def test_states_keep_their_types_in_a_state_dict() -> None:
    param = torch.nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))
    param.grad = torch.full_like(param, 1 / 3)
    first, second = HostAdam([param]), HostAdam([param])
    first.step()
    second.load_state_dict(first.state_dict())
    for name, value in first.state[param].items():
        loaded = second.state[param][name]
        assert loaded.dtype == value.dtype and torch.equal(loaded, value), name
    first.step()
    assert float(second.state[param]["step"]) == 1 and not torch.equal(second.state[param]["exp_avg"], first.state[param]["exp_avg"])
