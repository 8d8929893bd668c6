"""Test tied weights: one parameter under several names is in one unit, once, and stays tied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support import ranks
from tests.support.models import CASES, CLASSES, LENGTH, Batch, Block, class_loss
from tests.support.parity import SMALL_MODEL, Run, check_training, initialize
from tests.support.rows import slow_but, thinned

STAGES = (0, 1, 2, 3)


class TiedBlocks(nn.Module):
    """A model whose first and last block share one matrix, so it belongs to neither block's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(LENGTH, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, CLASSES)
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def _build_tied_blocks() -> nn.Module:
    torch.manual_seed(0)
    return TiedBlocks()


def _tied_case(name: str, run: Run) -> None:
    case = CASES[name]
    check_training(case.build, case.rows, case.forward, run, label=name)


def _tied_blocks(run: Run) -> None:
    check_training(_build_tied_blocks, CASES["mlp"].rows, class_loss, run, label="tied blocks")


def _stays_tied(stage: int) -> None:
    """Check that both names have the same object, one place in the units, and the same values in the state dict."""
    case = CASES["tied_coder"]
    model = case.build()
    names = ("encoder.embed.weight", "decoder.embed.weight", "head.weight")
    engine = initialize(model, Run(stage=stage))
    engine.backward(case.forward(engine, case.rows(0, 0, ranks.rank())))
    engine.step()
    assert model.head.weight is model.encoder["embed"].weight is model.decoder["embed"].weight
    slots = [slot.name for unit in engine.units for slot in unit.layout.slots]
    assert len([slot for slot in slots if slot in names]) == 1, slots
    assert sum(slot.numel for unit in engine.units for slot in unit.layout.slots) == sum(p.numel() for p in case.build().parameters())
    if stage == 3:
        state = engine._zero3_consolidated_16bit_state_dict()
        if ranks.rank() == 0:
            assert set(names) <= set(state), sorted(state)
            assert all(torch.equal(state[name], state[names[0]]) for name in names)
        else:
            assert state is None
    engine.destroy()


def _tied_to_frozen(stage: int) -> None:
    """Tie the head to a frozen embedding: no gradient, no update, and all other parameters train."""

    def build() -> nn.Module:
        model = CASES["tied_coder"].build()
        model.head.weight.requires_grad_(False)
        return model

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["input_ids"])
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    check_training(build, CASES["tied_coder"].rows, forward, Run(stage=stage), label="tied to frozen")


@pytest.mark.fast_rows("3-t5", "0-gpt2")
@thinned(stage=STAGES, name=["gpt2", "bart", "t5", "tied_coder"])
def test_tied_models_in_16_bit_with_accumulation(name: str, stage: int) -> None:
    ranks.run_ranks(_tied_case, 2, name, Run(stage=stage, dtype="bf16", accumulation=2, clip=0.1))


@pytest.mark.fast_rows("3-fp32")
@thinned(stage=STAGES, dtype=["fp32", "fp16"])
def test_weight_shared_by_two_blocks(stage: int, dtype: str) -> None:
    ranks.run_ranks(_tied_blocks, 3, Run(stage=stage, dtype=dtype, accumulation=2))


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_tied_weights_stay_one_parameter(stage: int) -> None:
    ranks.run_ranks(_stays_tied, 2, stage)


@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_frozen_tied_weight(stage: int) -> None:
    ranks.run_ranks(_tied_to_frozen, 2, stage)


def _memory_in_common() -> None:
    """Two parameters with one memory, or a parameter and a buffer, are refused by name where one is trained."""
    import hf_zero
    from hf_zero.errors import StateError

    for stage in STAGES:
        for trained, shadow in ((True, False), (True, True), (False, False)):
            model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=not shadow), "top": nn.Linear(6, 2)})
            if shadow:
                if stage % 2:
                    model["head"].register_buffer("copy", model["embed"].weight.data)
                else:
                    model["head"].copy = model["embed"].weight.data.t()
                other = "head.copy"
            else:
                model["head"].weight.data = model["embed"].weight.data
                other = "head.weight"
            for part in ("embed", "head"):
                model[part].requires_grad_(trained)
            config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
            optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
            if trained:
                with pytest.raises(
                    StateError, match=rf"(embed.weight and {other}|{other} and embed.weight) are two tensors that share memory"
                ):
                    hf_zero.initialize(model=model, optimizer=optimizer, config=config)
            else:
                hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0].destroy()


class _Slices(nn.Module):
    """Two trained matrices over one larger tensor: columns that overlap, or lie beside each other; or an attribute over some columns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        base = torch.randn(4, 6)
        self.first = nn.Parameter(base[:, :4])
        self.second = nn.Parameter({"overlap": base[:, 3:], "beside": base[:, 4:], "attribute": base[:, 4:], "transposed": base.t()}[kind])
        if kind == "attribute":
            self.window = base[1:3, 3:5].expand(3, 2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs @ self.first).square().sum() + (inputs @ self.second).square().sum()


def _slices_in_common() -> None:
    """Slices of a tensor with elements in common are refused by name; slices that lie beside each other train as in plain PyTorch."""
    import hf_zero
    from hf_zero.errors import StateError

    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": 1}}
    for kind, other in (("overlap", "second"), ("transposed", "second"), ("attribute", "window")):
        model = _Slices(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(StateError, match=rf"((first|second) and {other}|second and first) are two tensors that share memory"):
            hf_zero.initialize(model=model, optimizer=optimizer, config=config)
    inputs, models = torch.linspace(-1, 1, 8).view(2, 4), [_Slices("beside"), _Slices("beside")]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    engine = hf_zero.initialize(model=models[1], optimizer=optimizers[1], config=config)[0]
    for _ in range(2):
        optimizers[0].zero_grad()
        models[0](inputs).backward()
        optimizers[0].step()
        engine.backward(engine(inputs))
        engine.step()
    for plain, param in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(param.detach(), plain.detach())
    engine.destroy()


def _recomputed_attribute() -> None:
    """torch's old ``spectral_norm`` leaves a plain tensor over the parameter's memory, and computes it anew in each forward."""
    import hf_zero

    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 1))

    inputs = torch.linspace(-1, 1, 12).view(3, 4)
    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        plain(inputs).square().sum().backward()
        optimizer.step()
    for stage in (1, 3):
        model = build()
        config = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage, **SMALL_MODEL}}
        engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
        for _ in range(3):
            engine.backward(engine(inputs).square().sum())
            engine.step()
        with hf_zero.zero.GatheredParameters(list(model.parameters())):
            for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(param.detach(), expected.detach(), msg=f"{name} at stage {stage}")
        engine.destroy()


def _scripted_parts() -> None:
    """A traced part trains, a scripted one is refused by name."""
    import hf_zero
    from hf_zero.errors import UnsupportedError

    for stage in (1, 3):
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, **SMALL_MODEL}}
        for kind in ("trace", "script"):
            part = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            model = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(part, torch.ones(1, 4)) if kind == "trace" else torch.jit.script(part))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if kind == "script":
                with pytest.raises(UnsupportedError, match=r"^1 was made by torch\.jit\.script"):
                    hf_zero.initialize(model=model, optimizer=optimizer, config=config)
                continue
            before = part[0].weight.detach().clone()
            engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
            with hf_zero.zero.GatheredParameters(list(model.parameters())):
                assert not torch.equal(model.get_parameter("1.0.weight"), before)
            engine.destroy()


def test_memory_in_common_is_refused_by_name() -> None:
    ranks.run_ranks(_memory_in_common, 2)
    ranks.run_ranks(_scripted_parts, 2)


def test_an_attribute_that_each_forward_computes_anew_is_no_second_parameter() -> None:
    ranks.run_ranks(_recomputed_attribute, 2)


def test_slices_of_one_tensor() -> None:
    ranks.run_ranks(_slices_in_common, 1)
