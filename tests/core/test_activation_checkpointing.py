"""Test `deepspeed.checkpointing`: recomputation, inputs on the host or divided over ranks, random states; results equal those without
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.activation_checkpointing import checkpoint, random_states, recompute, seed_model_parallel
from hf_zero.activation_checkpointing.host_activations import HostActivations
from hf_zero.config.schema.storage import ActivationCheckpointing
from hf_zero.deepspeed.served import checkpointing
from hf_zero.errors import ConfigError, StateError
from tests.support import ranks
from tests.support.models import CASES, Mlp, class_loss
from tests.support.parity import Run, Trace, check_bitwise, initialize, train


@pytest.fixture(autouse=True)
def settings_of_this_test_only() -> Iterator[None]:
    yield
    checkpointing.configure()
    random_states().reset()


class Block(nn.Module):
    """A layer with dropout from the default generator and from a named state, over an input of any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, hidden: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        self.calls += 1
        hidden = nn.functional.dropout(self.linear(hidden) * scale, 0.3)
        with random_states().fork():
            hidden = nn.functional.dropout(hidden, 0.3)
        return hidden.tanh().masked_fill(mask, 0.0), mask


def run_blocks(call: Callable[..., Any]) -> list[Tensor]:
    """Return the output, gradients and states of both generators after a forward and backward of three blocks, alike on all ranks."""
    seed_model_parallel(0, model_rank=0)
    blocks = nn.ModuleList(Block() for _ in range(3))
    inputs = torch.randn(4, 5, 6, requires_grad=True)
    hidden, mask = inputs, torch.zeros(4, 5, 6, dtype=torch.bool)
    mask[0, 0] = True
    for block in blocks:
        hidden, mask = call(block, hidden, mask, 0.5)
    hidden.square().sum().backward()
    expected = 1 if call is plain else 2
    assert [block.calls for block in blocks] == [expected] * 3
    grads = [param.grad for param in blocks.parameters()]
    return [hidden, inputs.grad, *grads, torch.get_rng_state(), *random_states().get_states().values()]


def plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


SETTINGS = [
    {},
    {"checkpoint_in_cpu": True},
    {"synchronize": True, "profile": True},
    {"partition_activations": True, "checkpoint_in_cpu": True},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_results_gradients_and_random_states_are_those_of_the_plain_call(settings: dict[str, bool]) -> None:
    checkpointing.configure(None, **settings)
    assert checkpointing.is_configured()
    for one, other in zip(run_blocks(plain), run_blocks(checkpointing.checkpoint), strict=True):
        assert torch.equal(one, other)
    checkpointing.reset()


def test_inputs_really_go_through_the_host_store(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_zero.activation_checkpointing import host_activations

    monkeypatch.setattr(host_activations, "LEAST_BYTES", 1)
    taken: list[torch.Size] = []
    save, copy_out, copied = HostActivations.save, HostActivations._copy_out, []

    def spy(self: HostActivations, tensor: Tensor) -> Any:
        self.copies_always = True
        taken.append(tensor.shape)
        return save(self, tensor)

    def count(self: HostActivations, group: Any, pieces: list[Any]) -> None:
        copy_out(self, group, pieces)
        copied.append(sum(piece.host is not None for piece in pieces))

    monkeypatch.setattr(HostActivations, "save", spy)
    monkeypatch.setattr(HostActivations, "_copy_out", count)
    reference = run_blocks(plain)
    checkpointing.configure(None, checkpoint_in_cpu=True)
    for one, other in zip(reference, run_blocks(checkpointing.checkpoint), strict=True):
        assert torch.equal(one, other)
    assert taken.count(torch.Size([4, 5, 6])) >= 3 and torch.Size([6, 6]) not in taken, "inputs, and nothing from inside the function"
    assert len(copied) == 2 and all(copied), "the inputs of the last block, which backward wants first, stay"


def test_nested_checkpoints_and_keywords() -> None:
    checkpointing.configure(None, checkpoint_in_cpu=True)
    linear = nn.Linear(4, 4)

    def outer(x: Tensor, *, factor: float) -> Tensor:
        return checkpoint(linear, x) * factor

    x = torch.randn(2, 4, requires_grad=True)
    checkpoint(outer, x, factor=3.0).sum().backward()
    y = x.detach().clone().requires_grad_()
    (linear(y) * 3.0).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_profile_logs_forward_and_recomputation(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_zero import observe

    monkeypatch.setattr(observe.logger, "propagate", True)
    checkpointing.configure(None, profile=True)
    checkpoint(nn.Linear(2, 2), torch.randn(1, 2, requires_grad=True)).sum().backward()
    assert "forward took" in caplog.text and "recompute took" in caplog.text


def test_arguments_win_over_the_configuration() -> None:

    config = {"train_batch_size": 4, "activation_checkpointing": {"cpu_checkpointing": True, "profile": True}}
    checkpointing.configure(None, deepspeed_config=config, profile=False)
    assert recompute._present.settings == ActivationCheckpointing(cpu_checkpointing=True)
    checkpointing.configure(None, deepspeed_config={"train_batch_size": 4})
    assert recompute._present.settings == ActivationCheckpointing()


def test_contiguous_checkpoints_ask_for_the_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "_layers", None)
    with pytest.raises(ConfigError, match="number of layers"):
        checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True)
    section = {"activation_checkpointing": {"number_checkpoints": 2}}
    checkpointing.configure(None, deepspeed_config=section, contiguous_checkpointing=True)
    checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=2)
    checkpointing.set_num_layers(2)
    checkpointing.configure(None, contiguous_checkpointing=True)


def test_random_states_are_named_seeded_and_kept_apart() -> None:
    states = checkpointing.get_cuda_rng_tracker()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    states.reset()
    states.add("one", 1)
    assert torch.equal(torch.get_rng_state(), before), "adding draws nothing"
    with states.fork("one"):
        first = torch.rand(4)
    with states.fork("one"):
        second = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(first, second)
    assert torch.equal(first, torch.rand(4, generator=torch.Generator().manual_seed(1)))
    with pytest.raises(StateError, match="'two' with seed 1: seed 1 is already in use"):
        states.add("two", 1)
    with pytest.raises(StateError, match="there is no random state 'three', only: one"):
        with states.fork("three"):
            pass
    checkpointing.model_parallel_reconfigure_tp_seed(5)
    assert list(states.get_states()) == ["model-parallel-rng"]


class _Mpu:
    """The model-parallel unit that scripts with split layers pass."""

    def get_model_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD


def _divided(to_host: bool) -> None:
    from hf_zero.activation_checkpointing.recompute import DividedInputs, SavedPart
    from hf_zero.comm.back_end import build_collectives
    from hf_zero.comm.topology import build_topology

    store = DividedInputs(build_collectives(build_topology()))
    value = torch.arange(15.0).view(3, 5)
    saved = store.save(value)
    assert isinstance(saved, SavedPart) and saved.part.numel() == -(-15 // torch.distributed.get_world_size())
    assert torch.equal(store.load(saved), value)

    checkpointing.configure(_Mpu(), partition_activations=True, checkpoint_in_cpu=to_host)
    ours, theirs = run_blocks(checkpointing.checkpoint), run_blocks(plain)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    checkpointing.partition_activations_in_checkpoint(False)
    for one, other in zip(run_blocks(checkpointing.checkpoint), theirs, strict=True):
        assert torch.equal(one, other)
    checkpointing.model_parallel_cuda_manual_seed(0)
    with random_states().fork():
        drawn = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(drawn, (torch.rand(1).item()))
    assert len(set(drawn)) == len(drawn), "split layers draw different numbers"
    checkpointing.configure()


@pytest.mark.parametrize("world", [2, 3])
def test_divided_inputs_are_gathered_in_backward(world: int) -> None:
    ranks.run_ranks(_divided, world, world == 3)


class Checkpointed(Mlp):
    """The test model with every block under `deepspeed.checkpointing.checkpoint`."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for block in self.blocks:
            hidden = checkpoint(block, hidden)
        return self.head(hidden)


def _trained(kind: type[nn.Module], run: Run, section: dict[str, Any]) -> Trace:
    torch.manual_seed(0)
    engine = initialize(kind().train(), replace(run, extra={"activation_checkpointing": section} if section else {}))
    trace = train(engine, CASES["mlp"].rows, class_loss, run)
    engine.destroy()
    return trace


def _parity(stage: int) -> None:
    run = Run(stage=stage)
    section = {"cpu_checkpointing": True, "partition_activations": True, "synchronize_checkpoint_boundary": True}
    check_bitwise(_trained(Checkpointed, run, section), _trained(Mlp, run, {}), "activation_checkpointing section")


@pytest.mark.parametrize("stage", [0, 3])
def test_training_with_the_section_is_training_without(stage: int) -> None:
    ranks.run_ranks(_parity, 2, stage)
