"""Deep copies of models with sharded parameters (averages, reference models), and modules that no engine gathers."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.core.units.sharded_parameter import WaitingParameter
from hf_zero.errors import StateError
from tests.support import ranks
from tests.support.models import CASES, class_loss
from tests.support.parity import Run, check, check_bitwise, initialize, reference, train
from tests.support.rows import slow_but
from tests.support.zero3 import whole_parameters

MLP = CASES["mlp"]
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_param": {"device": "cpu"}},
    "file": {"offload_param": {"device": "nvme"}},
}


def _run(folder: Path, place: str, dtype: str = "fp32") -> Run:
    section: dict[str, Any] = {"stage": 3}
    for name, value in PLACES[place].items():
        section[name] = value | ({"nvme_path": str(folder)} if value["device"] == "nvme" else {})
    return Run(3, dtype=dtype, extra={"zero_optimization": section})


# -- copies -------------------------------------------------------------------------------------------------------------


def _copy_of_an_engines_module(name: str, run: Run) -> None:
    """The copy trains in an engine of its own as the original does, and neither notices the other."""
    case = CASES[name]
    first = initialize(case.build(), run)
    copied = copy.deepcopy(first.module)
    for (label, param), original in zip(copied.named_parameters(), first.module.parameters(), strict=True):
        assert param.numel() == 0 and param.ds_shape == original.ds_shape and param.requires_grad == original.requires_grad, label
    trace = train(first, case.rows, case.forward, run)
    first.destroy()
    del first
    second = initialize(copied, run)
    check_bitwise(train(second, case.rows, case.forward, run), trace, f"the copy of {name}")
    second.destroy()
    if ranks.rank() == 0:
        check(trace, lambda follow=None: reference(case.build(), case.rows, case.forward, run, ranks.world(), follow), run, name)


@pytest.mark.fast_rows("mlp-file")
@pytest.mark.parametrize(("name", "place"), [("gpt2", "device"), ("albert", "device"), ("mlp", "host"), ("mlp", "file")])
def test_a_copy_of_an_engines_module_trains_like_it(name: str, place: str, tmp_path: Path) -> None:
    """gpt2 has tied weights, albert a block that runs several times."""
    ranks.run_ranks(_copy_of_an_engines_module, 2, name, _run(tmp_path, place))


@pytest.mark.slow  # fast: `test_a_copy_of_an_engines_module_trains_like_it`
def test_a_copy_of_a_16_bit_model_trains_like_it(tmp_path: Path) -> None:
    ranks.run_ranks(_copy_of_an_engines_module, 3, "mlp", _run(tmp_path, "device", "bf16"))


def _copy_before_the_engine(stage: int) -> None:
    import hf_zero

    with hf_zero.zero.Init():
        model = MLP.build()
    copied = copy.deepcopy(model)
    run = Run(stage)
    first, second = initialize(model, run), initialize(copied, run)
    trace = train(first, MLP.rows, class_loss, run)
    check_bitwise(train(second, MLP.rows, class_loss, run), trace, "copied before initialize")
    assert first.runtime.attached and second.runtime.attached
    first.destroy()
    second.destroy()


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_copy_of_a_model_under_construction_trains_like_it(stage: int) -> None:
    ranks.run_ranks(_copy_before_the_engine, 2, stage)


def _copy_is_no_part_of_the_engine(stage: int) -> None:
    """Inside a gather, and at stages that gather nothing, the copy is a plain model; its forwards are not the engine's."""
    import hf_zero

    run = Run(stage)
    engine = initialize(MLP.build(), run)
    with hf_zero.zero.GatheredParameters(list(engine.module.parameters())):
        copied = copy.deepcopy(engine.module)
    batch = MLP.rows(0, 0, ranks.rank())
    loss = class_loss(copied, batch)
    loss.backward()
    assert loss.item() == class_loss(MLP.build(), batch).item()
    assert all(param.grad is not None and type(param) is nn.Parameter for param in copied.parameters())
    assert engine.runtime.forwards == 0 and not engine.runtime.backward.begun
    copied.zero_grad()
    trace = train(engine, MLP.rows, class_loss, run)
    second = initialize(copied, run)
    assert engine.runtime.attached, "the engine of the copy has taken the hooks of the original's"
    check_bitwise(train(second, MLP.rows, class_loss, run), trace, f"copied whole, stage {stage}")
    engine.destroy()
    second.destroy()


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 2, 3))
def test_a_whole_copy_is_no_part_of_the_engine(stage: int) -> None:
    ranks.run_ranks(_copy_is_no_part_of_the_engine, 2, stage)


def _average() -> None:
    """An average of the weights, kept in a sharded copy, updated and saved as scripts for stage 3 do."""
    import hf_zero

    run = Run(3)
    engine = initialize(MLP.build(), run)
    average = copy.deepcopy(engine.module)
    expected = whole_parameters(engine.module)
    for step in range(3):
        engine.backward(class_loss(engine, MLP.rows(step, 0, ranks.rank())))
        engine.step()
        now = whole_parameters(engine.module)
        expected = {name: torch.lerp(now[name], value, 0.9) for name, value in expected.items()}
        for param, averaged in zip(engine.module.parameters(), average.parameters(), strict=True):
            with hf_zero.zero.GatheredParameters([param, averaged], modifier_rank=0), torch.no_grad():
                averaged.copy_(torch.lerp(param, averaged, 0.9))
    found = whole_parameters(average)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not torch.equal(found["head.weight"], whole_parameters(engine.module)["head.weight"])
    engine.destroy()


@pytest.mark.slow  # fast: test_empty_parameters.py
def test_an_average_of_the_weights() -> None:
    ranks.run_ranks(_average, 2)


class Repeating(nn.Module):
    """Its constructor repeats a block by deep copies: torch's transformer does, and one layer by hand."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        linear = nn.Linear(8, 8)
        self.more = nn.ModuleList(copy.deepcopy(linear) for _ in range(2))
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.encoder(inputs)
        for layer in self.more:
            hidden = layer(hidden).tanh()
        return hidden.sum()


def _constructor_that_copies() -> None:
    import hf_zero

    torch.manual_seed(0)
    plain = Repeating()
    torch.manual_seed(0)
    with hf_zero.zero.Init():
        model = Repeating()
    assert all(param.numel() == 0 for param in model.parameters())
    assert all("apply" not in module.__dict__ for module in model.modules())
    assert len({id(param) for param in model.parameters()}) == len(list(plain.parameters()))
    found = whole_parameters(model)
    assert all(torch.equal(found[name], value) for name, value in plain.named_parameters())
    inputs = torch.randn(2, 3, 8)
    engine = initialize(model, Run(3))
    torch.testing.assert_close(engine(inputs), plain(inputs))
    engine.destroy()


def test_constructors_may_repeat_a_block_by_deep_copies() -> None:
    ranks.run_ranks(_constructor_that_copies, 2)


def _copy_of_an_engine() -> None:
    from hf_zero.errors import StateError

    engine = initialize(MLP.build(), Run(3))
    with pytest.raises(StateError, match=r"copy\.deepcopy\(engine\.module\).*GatheredParameters"):
        copy.deepcopy(engine)
    engine.destroy()


def test_a_copy_of_an_engine_is_refused() -> None:
    ranks.run_ranks(_copy_of_an_engine, 2)


# -- no engine ------------------------------------------------------------------------------------------------------------


def _called_without_an_engine() -> None:
    import hf_zero
    from hf_zero.core.units.guards import refuse_sharded
    from hf_zero.errors import StateError

    inputs = torch.randn(2, 4)
    with hf_zero.zero.Init():
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(3, 4))[:2]
    with pytest.raises(StateError, match=r"Linear was called.*Linear\.weight.*accelerator\.prepare.*GatheredParameters"):
        model(inputs)
    with hf_zero.zero.GatheredParameters(list(model.parameters())):
        expected = model(inputs)
    engine = initialize(model, Run(3))
    assert all(refuse_sharded not in module._forward_pre_hooks.values() for module in model.modules())
    assert torch.equal(engine(inputs), expected) and torch.equal(model(inputs), expected)
    copied = copy.deepcopy(model)
    with pytest.raises(StateError, match="a deep copy needs an engine of its own"):
        copied(inputs)
    for wrong in (copied, copied[0]):
        with pytest.raises(StateError, match="is divided over the ranks"):
            wrong(inputs)
    with hf_zero.zero.GatheredParameters(list(copied.parameters())):
        assert torch.equal(copied(inputs), expected)
    assert torch.equal(engine(inputs), expected)
    engine.destroy()


def test_a_call_without_an_engine_says_what_to_do() -> None:
    ranks.run_ranks(_called_without_an_engine, 2)


# -- pickles ------------------------------------------------------------------------------------------------------------


def _pickled() -> None:
    """A pickle of the module that an engine trains has the plain module, with whole parameters; or one error says what to do."""
    import hf_zero

    case, plain = CASES["gpt2"], len(pickle.dumps(CASES["gpt2"].build()))
    for stage in (0, 2, 3):
        engine = initialize(case.build(), Run(stage, extra={"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
        engine.backward(case.forward(engine, case.rows(0, 0, ranks.rank())))
        module: Any = engine.module
        if stage == 3:
            with pytest.raises(StateError, match=r"is divided over the ranks .*GatheredParameters"):
                pickle.dumps(module)
        with pytest.raises(StateError, match=r"an engine was pickled"):
            torch.save(engine, io.BytesIO())
        with hf_zero.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
            written, stream = pickle.dumps(module), io.BytesIO()
            torch.save(module, stream)
            values = {name: value.clone() for name, value in module.state_dict().items()}
        stream.seek(0)
        assert len(written) < 1.5 * plain, stage  # no parameter brings the memory of its unit along
        for copied in (pickle.loads(written), torch.load(stream, weights_only=False)):
            assert {type(param) for param in copied.parameters()} == {
                nn.Parameter
            } and copied.lm_head.weight is copied.transformer.wte.weight
            torch.testing.assert_close(copied.state_dict(), values, rtol=0, atol=0)
            hooks = [hook for inner in copied.modules() for hook in (*inner._forward_hooks.values(), *inner._forward_pre_hooks.values())]
            assert not hooks and not any("hf_zero" in repr(value) for inner in copied.modules() for value in vars(inner).values())
            case.forward(copied, case.rows(0, 0, 0)).backward()
            torch.optim.SGD(copied.parameters(), lr=0.1).step()
        copied = copy.deepcopy(module)
        assert WaitingParameter not in {type(param) for param in copied.parameters()}
        engine.step()
        engine.destroy()


def test_a_pickle_of_a_trained_module_is_the_plain_module() -> None:
    ranks.run_ranks(_pickled, 2)
