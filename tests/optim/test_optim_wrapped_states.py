"""Optimizers whose states are tensors of a library's own class, as torchao's with 8 and 4 bits: plain PyTorch's bits, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.errors import CheckpointError
from hf_zero.utils import safe_get_full_optimizer_state
from tests.support import ranks
from tests.support.models import Batch
from tests.support.parity import Run, Trace, check_bitwise, initialize, train

BLOCK = 128


class Codes(torch.Tensor):
    """Bytes with a scale for each block of ``BLOCK`` elements, in torchao's form of a tensor class."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        made: Codes = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Codes:
        return cls(inner["codes"], inner["scale"])

    def numbers(self) -> Tensor:
        """Return the values, in the shape of the parameter."""
        blocks = self.codes.view(len(self.scale), -1).float() / 127 * self.scale[:, None]
        return blocks.view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args
            if not isinstance(target, Codes):
                return target.copy_(source.numbers())
            blocks = source.view(len(target.scale), -1)
            target.scale.copy_(blocks.abs().amax(1).clamp(min=1e-12))
            target.codes.copy_((blocks / target.scale[:, None] * 127).round().to(torch.int8).view(target.codes.shape))
            return target
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(args[0].codes, args[0].scale)
        return NotImplemented


class Momentum8bit(torch.optim.Optimizer):
    """Momentum in codes for tensors of whole blocks, and in fp32 for others."""

    def __init__(self, params: Any, lr: float = 1e-2, block: int = BLOCK) -> None:
        super().__init__(params, {"lr": lr})
        self.block = block

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, blocks = self.state[param], param.numel() // self.block
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    if param.numel() % self.block == 0:
                        state["exp_avg"] = Codes(torch.zeros(param.shape, dtype=torch.int8), torch.zeros(blocks))
                momentum = state["exp_avg"]
                value = 0.9 * (momentum.numbers() if isinstance(momentum, Codes) else momentum) + 0.1 * param.grad
                momentum.copy_(value)
                param.sub_(group["lr"] * value.sign())


def _make(kind: str, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    def make(params: Any) -> torch.optim.Optimizer:
        if kind == "stand-in":
            return Momentum8bit(params, **options)
        if kind == "fused":
            return torch.optim.AdamW(params, lr=1e-2, fused=True)
        import torchao.optim

        made: torch.optim.Optimizer = getattr(torchao.optim, kind)(params, lr=1e-2, **options)
        return made

    return make


class Wide(nn.Module):
    """Matrices of 4096 elements and more, the smallest that torchao keeps in codes, beside smaller parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs)
        return output


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Wide()


def _feed(step: int, micro: int, rank: int) -> Batch:
    return {"inputs": torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))}


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(batch["inputs"]).square().mean()
    return loss


def _plain(kind: str, run: Run, world: int) -> tuple[Trace, dict[str, Any]]:
    """Train in plain PyTorch; also return the first states by name of the parameter."""
    model, trace = _model(), Trace()
    optimizer = _make(kind)(model.parameters())
    for step in range(run.steps):
        losses = []
        for rank in range(world):
            loss = _loss(model, _feed(step, 0, rank))
            (loss / world).backward()
            losses.append(loss.item())
        trace.losses.append(sum(losses) / world)
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return trace, {name: optimizer.state[param]["exp_avg"] for name, param in model.named_parameters()}


@contextmanager
def _eager() -> Iterator[None]:
    """Let torchao's update, which it compiles, run as it is written."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _train(kind: str, stages: tuple[int, ...], folder: Path) -> None:
    run = Run(steps=3)
    with _eager():
        expected, states = _plain(kind, run, ranks.world())
        for stage in stages:
            model = _model()
            engine = initialize(model, replace(run, stage=stage), optimizer=_make(kind)(model.parameters()))
            trace = train(engine, _feed, _loss, run)
            check_bitwise(trace, replace(expected, norms=trace.norms), f"{kind}, stage {stage}")
            for name, param in engine.module.named_parameters():
                found = safe_get_full_optimizer_state(param, "exp_avg")
                wanted = torch.empty(param.ds_shape if hasattr(param, "ds_shape") else param.shape).copy_(states[name])
                assert found is not None and torch.equal(found, wanted), (kind, stage, name)
            engine.save_checkpoint(str(folder / str(stage)))
            further = train(engine, _feed, _loss, run).losses
            engine.destroy()
            model = _model()
            engine = initialize(model, replace(run, stage=3 - stage), optimizer=_make(kind)(model.parameters()))
            engine.load_checkpoint(str(folder / str(stage)))
            assert train(engine, _feed, _loss, run).losses == further, (kind, stage)
            engine.destroy()


def _errors(folder: Path) -> None:
    model = _model()
    engine = initialize(model, Run(1), optimizer=_make("stand-in")(model.parameters()))
    train(engine, _feed, _loss, Run(1))
    engine.save_checkpoint(str(folder))
    engine.destroy()

    for make, text in (
        (_make("stand-in", block=64), r"has tensors of the shapes .* set the block_size that it was saved with"),
        (_make("stand-in", block=65), r"as a Codes, and Momentum8bit keeps a Tensor"),
    ):
        model = _model()
        engine = initialize(model, Run(1), optimizer=make(model.parameters()))
        with pytest.raises(CheckpointError, match=text):
            engine.load_checkpoint(str(folder))
        engine.destroy()


def _together(folder: Path) -> None:
    _train("stand-in", (0, 1), folder / "states")
    _errors(folder / "errors")


def test_states_of_a_tensor_class(tmp_path: Path) -> None:
    ranks.run_ranks(_together, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stand-in", "fused", "AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"])
def test_every_stage(kind: str, tmp_path: Path) -> None:
    if kind.startswith("Adam"):
        pytest.importorskip("torchao")
    ranks.run_ranks(_train, 2, kind, (0, 1, 2, 3), tmp_path)
