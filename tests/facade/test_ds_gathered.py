"""What scripts do with whole parameters of stage 3: keep them, ask their attributes, gather and release them by hand."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.core.units import checksums
from hf_zero.errors import StateError
from tests import pretend
from tests.support import ranks
from tests.support.models import CASES, class_loss
from tests.support.parity import Run, check, initialize, micro_step, reference, train

MLP = CASES["mlp"]


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The loop of many scripts; on a CPU nothing in it copies."""
    import hf_zero

    state = {}
    for name, param in model.named_parameters():
        with hf_zero.zero.GatheredParameters(param, modifier_rank=None):
            state[name] = param.detach().cpu()
    return state


def buffer_bytes(engine: Any) -> int:
    return sum(unit.whole.flat.untyped_storage().nbytes() for unit in engine.units)


def _taken_tensors() -> None:
    import hf_zero

    engine = initialize(MLP.build(), Run(3))
    start = dict(MLP.build().named_parameters())
    by_one = whole(engine.module)
    with hf_zero.zero.GatheredParameters(list(engine.module.parameters())):
        at_once = {name: value.cpu() for name, value in engine.module.state_dict().items()}
    with hf_zero.zero.GatheredParameters(list(engine.module.parameters())):
        arrays = {name: param.detach().numpy() for name, param in engine.module.named_parameters()}
        for param in engine.module.parameters():
            param.detach().numpy()  # the array is gone, but its storage cannot be resized any more
    kept = {name: Tensor(array) for name, array in arrays.items()}
    assert buffer_bytes(engine) == 0
    for step in range(2):
        micro_step(engine, MLP.rows(step, 0, ranks.rank()), MLP.forward, 0)
    for name, value in start.items():
        assert all(torch.equal(values[name], value) for values in (by_one, at_once, kept)), name
        assert not torch.equal(whole(engine.module)[name], value), name


def test_tensors_taken_out_of_gathered_parameters_keep_their_values() -> None:
    ranks.run_ranks(_taken_tensors, 2)


def _between_forward_and_backward(look: bool) -> dict[str, Tensor]:
    """Trained weights; ``look``: parameters are gathered and left again between forward and backward."""
    import hf_zero

    engine = initialize(MLP.build(), Run(3))
    buffers = [unit.whole.flat for unit in engine.units]
    for step in range(2):
        loss = MLP.forward(engine, MLP.rows(step, 0, ranks.rank()))
        if look:
            with hf_zero.zero.GatheredParameters(list(engine.module.parameters())):
                pass
        engine.backward(loss)
        engine.step()
    if not look:
        assert all(unit.whole.flat is buffer for unit, buffer in zip(engine.units, buffers, strict=True)), "a buffer was given away"
    assert buffer_bytes(engine) == 0
    return whole(engine.module)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("world", [2, 3])
def test_gathering_between_forward_and_backward_changes_nothing(world: int) -> None:
    plain = ranks.run_ranks(_between_forward_and_backward, world, False)
    looked = ranks.run_ranks(_between_forward_and_backward, world, True)
    for name, value in plain[0].items():
        assert torch.equal(value, looked[0][name]), name


class Odd(nn.Module):
    """A parameter that is no number to train, an empty one and a scalar beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(4), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0))
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.layer = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.factor).sum() + self.codes.sum() + self.nothing.sum()


def _attributes(threshold: int) -> None:
    from hf_zero.zero import ZeroParamStatus, ZeroParamType

    shapes = {name: param.shape for name, param in Odd().named_parameters()}
    engine = initialize(Odd(), Run(3, extra={"zero_optimization": {"stage3_param_persistence_threshold": threshold}}))
    for name, param in engine.module.named_parameters():
        stays = ranks.world() == 1 or threshold > 0 or name == "codes"
        assert (param.ds_shape, param.ds_numel) == (shapes[name], shapes[name].numel()), name
        assert param.ds_status is (ZeroParamStatus.AVAILABLE if stays else ZeroParamStatus.NOT_AVAILABLE), name
        assert param.ds_persist == stays and param.partition_numel() == param.ds_tensor.numel(), name
        assert param.ds_summary()["numel"] == param.ds_numel and len(param.ds_active_sub_modules) == 0, name
        assert (param.ds_zero_partition_rank, param.ds_zero_partition_world_size) == (ranks.rank(), ranks.world()), name
        assert param.ds_param_type is ZeroParamType.PARTITIONED and param.ds_secondary_tensor is None and not param.is_external_param, name
        param.all_gather()
        assert param.shape == shapes[name], name
        param.partition()
        assert param.shape == (shapes[name] if stays else torch.Size([0])), name
    engine.backward(engine(torch.ones(2, 8)))
    engine.step()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("threshold", [0, 10**6])
def test_every_parameter_at_stage_3_has_the_attributes_that_libraries_read(world: int, threshold: int) -> None:
    ranks.run_ranks(_attributes, world, threshold)


def _by_hand() -> None:
    import hf_zero

    torch.manual_seed(0)
    with hf_zero.zero.Init():
        layer = nn.Linear(6, 4)
    weight, bias = layer.weight, layer.bias
    weight.all_gather_coalesced([weight, bias]).wait()
    weight.partition([weight, bias])
    weight.all_gather([weight, bias])
    assert (weight.shape, bias.shape) == ((4, 6), (4,))
    weight.data.fill_(3.0)
    weight.partition([weight, bias])
    assert (weight.numel(), bias.numel()) == (0, 0)
    weight.all_gather()
    assert not torch.equal(weight.detach(), torch.full((4, 6), 3.0)), "the change was not announced"
    weight.data.fill_(3.0)
    weight.partition(has_been_updated=True)
    weight.all_gather()
    assert torch.equal(weight.detach(), torch.full((4, 6), 3.0))


def test_all_gather_and_partition_of_single_parameters_and_lists() -> None:
    ranks.run_ranks(_by_hand, 2)


def _saved_parameters(stage: int) -> None:
    import hf_zero

    engine = initialize(MLP.build(), Run(stage))
    params = dict(engine.module.named_parameters())
    first = next(iter(params))
    params[first].tagged = "by the user"
    with hf_zero.zero.GatheredParameters(list(params.values())):
        file = io.BytesIO()
        torch.save({name: param.cpu() for name, param in params.items()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for name, param in params.items():
            assert isinstance(loaded[name], nn.Parameter) and torch.equal(loaded[name], param), name
            assert vars(loaded[name]) == ({"tagged": "by the user"} if name == first else {}), name


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_are_saved_as_ordinary_ones(stage: int) -> None:
    ranks.run_ranks(_saved_parameters, 2, stage)


def _other_data(threshold: int) -> None:
    """``param.data = value`` inside a gather, as PEFT's initialisations of a base weight do it: rank 0's value counts everywhere."""
    import hf_zero
    from hf_zero.errors import StateError

    def change(model: nn.Module, factor: float) -> None:
        for param in (model.blocks[0].up.weight, model.head.bias):
            param.data = param.data * factor + 0.25

    section = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    run = Run(3, extra={"zero_optimization": section})
    with hf_zero.zero.Init():
        model = MLP.build()
    for build in (lambda: model, lambda: initialize(model, run).module):
        module = build()
        with hf_zero.zero.GatheredParameters([module.blocks[0].up.weight, module.head.bias], modifier_rank=0):
            change(module, 2.0 if ranks.rank() == 0 else -3.0)
    plain = MLP.build()
    change(plain, 2.0)
    change(plain, 2.0)
    assert all(torch.equal(value, whole(model)[name]) for name, value in plain.named_parameters())
    engine = initialize(model, run)
    trace = train(engine, MLP.rows, class_loss, run)
    if ranks.rank() == 0:
        check(trace, reference(plain, MLP.rows, class_loss, run, ranks.world()), run, "data replaced in a gather")
    with pytest.raises(StateError, match=r"head\.bias has shape \(4,\).*shape \(5,\)"):
        with hf_zero.zero.GatheredParameters(engine.module.head.bias, modifier_rank=0):
            engine.module.head.bias.data = torch.zeros(5)
    engine.destroy()


@pytest.mark.fast_rows("1000000")
@pytest.mark.parametrize("threshold", [0, 10**6])
def test_data_replaced_inside_a_gather(threshold: int) -> None:
    ranks.run_ranks(_other_data, 2, threshold)


def _averages(modifier_rank: int | None, who: list[int], threshold: int, folder: str) -> tuple[str, bool]:
    """An average of weights that some ranks write, kept by a second engine; (the error, whether the average is what was written)."""
    import hf_zero

    small = {"stage3_param_persistence_threshold": threshold}
    engine, average = (
        initialize(MLP.build(), Run(3, extra={"zero_optimization": small})),
        initialize(MLP.build(1), Run(3, extra={"zero_optimization": small})),
    )
    for param in average.parameters():
        param.requires_grad_(False)
    start, trained = ({name: value.clone() for name, value in whole(each.module).items()} for each in (average, engine))
    text = ""
    with torch.no_grad():
        for param, mean in zip(engine.parameters(), average.parameters(), strict=True):
            try:
                with hf_zero.zero.GatheredParameters([param, mean], modifier_rank=modifier_rank):
                    if ranks.rank() in who:
                        mean.data.copy_(0.5 * param.data + 0.5 * mean.data)
            except StateError as error:
                text = str(error)
    try:
        average.save_checkpoint(folder)
    except StateError as error:
        text = text or str(error)
    now = whole(average.module)
    return text, all(torch.equal(now[name], 0.5 * trained[name] + 0.5 * start[name]) for name in start)


@pytest.mark.fast_rows("None-who0-True-0", "None-who1-False-1000000", "None-who2-False-0", "0-who3-True-0", "1-who4-True-1000000")
@pytest.mark.parametrize("threshold", [0, 10**6])
@pytest.mark.parametrize(
    ("modifier_rank", "who", "kept"), [(None, [0, 1], True), (None, [0], False), (None, [1], False), (0, [0], True), (1, [0, 1], True)]
)
def test_changes_count_or_are_refused(modifier_rank: int | None, who: list[int], kept: bool, threshold: int, tmp_path: Any) -> None:
    for text, is_average in ranks.run_ranks(_averages, 2, modifier_rank, who, threshold, str(tmp_path)):
        assert bool(text) is not kept and (is_average or not kept), text
        assert kept or "GatheredParameters" in text


def _unwrapped(stage: int) -> None:
    """Inside, each rank runs the model as often as it likes; afterwards training goes on."""
    from deepspeed.accelerator import is_current_accelerator_supported
    from deepspeed.runtime.zero import unwrap_model_for_generation

    assert is_current_accelerator_supported()
    plain = MLP.build().to(ranks.device())
    engine = initialize(MLP.build(), Run(stage))
    batch = MLP.rows(0, 0, ranks.rank())
    with unwrap_model_for_generation(engine) as model, torch.no_grad():
        assert model is engine and engine.module.blocks[0].up.weight.numel() > 0
        for _ in range(1 + ranks.rank()):
            torch.testing.assert_close(model(batch["inputs"]), plain(batch["inputs"]))
    if stage == 3:
        assert engine.module.blocks[0].up.weight.numel() == 0
    micro_step(engine, batch, MLP.forward, 0)
    assert engine.was_step_applied()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_unwrapped_for_generation(stage: int) -> None:
    ranks.run_ranks(_unwrapped, 2, stage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.complex64])
def test_a_checksum_on_a_device_sees_an_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for piece in (1 << 22, 7):
        monkeypatch.setattr(checksums, "_PIECE", piece)
        values = torch.arange(40).to(dtype)
        swapped = values.clone()
        swapped[[3, 30]] = swapped[[30, 3]]
        zeros = torch.zeros(40, dtype=dtype)
        moved = [zeros.index_fill(0, torch.tensor([place]), 1) for place in range(40)]
        sums = [checksums._sum_of_places(tensor) for tensor in (values, values.flip(0), swapped, zeros, zeros[1:], *moved)]
        assert len(set(sums)) == len(sums)
        assert checksums._sum_of_places(values.clone()) == sums[0]


def _another_order() -> list[int]:
    """Checksums, on a device, of a tensor and of the same rows in another order."""
    values = torch.arange(12.0, device=ranks.device())
    return [checksums.checksum(tensor) for tensor in (values, values.clone(), values.flip(0))]


@pytest.mark.skipif(bool(pretend.missing()), reason=pretend.missing())
def test_the_checksum_of_a_tensor_on_a_device_is_of_its_order() -> None:
    first, again, flipped = ranks.run_ranks(_another_order, 1, env={"HF_ZERO_TEST_DEVICE": pretend.NAME}, group=False)[0]
    assert first == again != flipped
