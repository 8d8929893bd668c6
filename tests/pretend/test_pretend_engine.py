"""The engine on the pretend accelerator: every copy and every wait that a device needs, and the numbers of a CPU.

A job fails when the device complains (``support/ranks.py`` asks it), so parity alone is not what is checked here: reading what a stream
may still be writing, freeing what one may still read, and overwriting what is being copied are errors of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import pretend
from tests.pretend import network
from tests.support import device_axes, device_jobs, ranks
from tests.support.checkpoints import IN_BACKGROUND
from tests.support.models import CASES
from tests.support.offload_runs import blocks_of, train_case, ways
from tests.support.parity import LIMITS, Run, difference

pytestmark = pytest.mark.skipif(bool(pretend.missing()), reason=pretend.missing())

STAGES = (0, 1, 2, 3)
BACKENDS = {"gloo": "staged through the host", network.NAME: "ordered as nccl orders it"}


def on_devices(function: Callable[..., Any], *args: Any, backend: str = network.NAME, world: int = 2, **options: Any) -> list[Any]:
    """Calls ``function`` on ``world`` ranks, each with a pretend device."""
    env = {"HF_ZERO_TEST_DEVICE": pretend.NAME, "HF_ZERO_TEST_BACKEND": backend}
    return ranks.run_ranks(function, world, *args, env=env, timeout=200.0, **options)


# -- parity ------------------------------------------------------------------------------------------------------------


@pytest.mark.fast_rows("pretend_ccl")
@pytest.mark.parametrize("backend", BACKENDS)
def test_gpt2_trains_as_on_the_cpu(backend: str) -> None:
    stages = (0, 2, 3) if backend == network.NAME else (1, 3)
    on_devices(device_jobs.parity, ["gpt2"], [Run(stage=stage, accumulation=2, clip=0.5) for stage in stages], backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_16_bit(stage: int, dtype: str) -> None:
    """Over gloo, which adds up in fp32 as the reference does; nccl adds in the type of the message."""
    names = ["gpt2", "llama", "tied_coder", "mlp"]
    on_devices(device_jobs.parity, names, [Run(stage=stage, dtype=dtype, accumulation=2, clip=0.5)], backend="gloo")


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_other_models(stage: int) -> None:
    names = ["llama", "t5", "bart", "albert", "mixtral", "vit", "conv", "tied_coder", "mlp"]
    on_devices(
        device_jobs.parity, [name for name in names if name in CASES], [Run(stage=stage), Run(stage=stage, accumulation=2, clip=0.1)]
    )


IN_NODE = {"hf_zero": {"param_shard_size": 2}}


@pytest.mark.slow
def test_parameters_in_the_node() -> None:
    """Gradients in two hops, and shards that go to every node, on devices in the order that nccl has."""
    on_devices(device_jobs.parity, ["gpt2", "mlp"], [Run(stage=3, accumulation=2, clip=0.5, extra=IN_NODE)], world=4)


# -- offload -----------------------------------------------------------------------------------------------------------


def test_offload_changes_nothing() -> None:
    on_devices(device_jobs.offload, "mlp", [Run(stage=3, dtype="bf16")], ["parameters cpu, apart", "both nvme, some kept, apart"])
    on_devices(device_jobs.offload, "mlp", [Run(stage=2, accumulation=2, clip=0.5)], ["cpu, apart"])


@pytest.mark.slow  # fast: `test_offload_changes_nothing`
def test_offload_of_quantized_collectives_changes_nothing() -> None:
    """Codes of shards that come from the host, written and read in the order of the streams."""
    keys = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}}
    on_devices(device_jobs.offload, "mlp", [Run(stage=3, dtype="bf16")], ["parameters cpu, apart", "both cpu, apart"], keys)


@pytest.mark.slow
def test_offload_of_codes_in_two_hops_changes_nothing() -> None:
    keys = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}}
    run = Run(stage=3, dtype="bf16", extra=IN_NODE)
    on_devices(device_jobs.offload, "mlp", [run], ["parameters cpu, apart", "both cpu, apart"], keys, world=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "albert", "mlp"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_way_to_offload(stage: int, dtype: str, name: str) -> None:
    on_devices(device_jobs.offload, name, [Run(stage=stage, dtype=dtype), Run(stage=stage, dtype=dtype, accumulation=2, clip=0.1)], [])


def test_masters_stay_where_only_parameters_are_offloaded() -> None:
    on_devices(device_jobs.offload_param_alone)


# -- mistakes are noticed ----------------------------------------------------------------------------------------------


def _without(target: str, replacement: Any, way: str, run: Run) -> bool:
    """Whether a mistake in the package shows: in an error, in a complaint, or in the numbers."""
    from hf_zero.memory import copies

    plain, _ = train_case("mlp", run, {})
    owner, name = target.split(".")
    part, where = getattr(copies, owner), ways(run.stage)[way]
    assert hasattr(part, name)
    try:
        with blocks_of(where) as blocks, mock.patch.object(part, name, replacement):
            trace, _ = train_case("mlp", run, blocks)
    except Exception:  # whatever it leads to
        pretend.complaints()
        return True
    return bool(pretend.complaints()) or not difference(trace, plain).within(LIMITS[run.dtype])


def _nothing(*_args: Any) -> None: ...


def _keeps_nothing(mark: Any, device: torch.device, event: Any = None, keep: Any = None) -> None:
    mark._device, mark._event, mark._keep = device, event, None


@pytest.mark.parametrize(
    ("target", "replacement"),
    [("Mark.__init__", _keeps_nothing), ("Mark.wait", _nothing), ("Mark.order", _nothing)],
    ids=["init", "wait", "order"],
)
def test_a_forgotten_wait_is_noticed(target: str, replacement: Any) -> None:
    outcomes = ranks.observe_ranks(
        _without,
        1,
        target,
        replacement,
        "both cpu, apart",
        Run(stage=3, dtype="bf16"),
        env={"HF_ZERO_TEST_DEVICE": pretend.NAME, "HF_ZERO_TEST_BACKEND": network.NAME},
    )
    # A read of memory that the device gave back ends the process.
    assert outcomes[0].value is True or outcomes[0].status == "died", outcomes[0].text


# -- the rest of the engine: jobs of other files, on a device -----------------------------------------------------------


@pytest.mark.fast_rows("pipeline", "experts")
@pytest.mark.parametrize("axis", device_axes.AXES)
def test_axes_of_a_mesh(axis: str) -> None:
    on_devices(device_axes.AXES[axis])


@pytest.mark.slow  # fast: test_parity_checkpointing.py, `test_gpt2_trains_as_on_the_cpu`
def test_activation_checkpointing() -> None:
    on_devices(device_jobs.checkpointing)


def test_cpu_checkpointing() -> None:
    on_devices(device_jobs.cpu_checkpointing)


@pytest.mark.slow  # fast: test_checkpoint_background.py
@pytest.mark.parametrize("names", [["writer"], pytest.param(["datastates", "no room", "room for some"], marks=pytest.mark.slow)], ids=len)
def test_saving_in_the_background(names: list[str], tmp_path: Path) -> None:
    on_devices(device_jobs.saves, str(tmp_path), names)


@pytest.mark.slow  # fast: `test_offloaded_run_resumes` of test_checkpoint_resume.py
def test_checkpoints_travel_between_device_and_host(tmp_path: Path) -> None:
    state = on_devices(device_jobs.save, str(tmp_path / "device"), IN_BACKGROUND)[0]
    assert ranks.run_ranks(device_jobs.load, 2, str(tmp_path / "device"), state, {}, 2) == [[], []]
    assert on_devices(device_jobs.load, str(tmp_path / "device"), state, device_jobs.OFFLOADED, 3) == [[], []]
    state = ranks.run_ranks(device_jobs.save, 2, str(tmp_path / "host"), {})[0]
    assert on_devices(device_jobs.load, str(tmp_path / "host"), state, {}, 3) == [[], []]


# -- a rank whose device is not the current one (nobody called set_device) ----------------------------------------------


def _other_device() -> None:
    from hf_zero.activation_checkpointing.random_states import random_states, seed_model_parallel
    from hf_zero.checkpoint.commit.background import Background
    from hf_zero.checkpoint.files.rows import Entry
    from hf_zero.comm.comms_log import DeviceWatch

    device = ranks.device()
    assert torch.accelerator.current_device_index() != device.index
    values = torch.arange(8.0, device=device)
    copied = Background(0, 10.0).copy({"file": [Entry("values", torch.float32, (8,), (values,))]})[1]
    assert copied["file"][0].pieces[0].tolist() == list(range(8))

    watch = DeviceWatch(device)
    begin = watch.now()
    values.mul_(2)
    assert watch.seconds(begin, watch.now()) >= 0

    seed_model_parallel(3, ranks.rank())
    with random_states().fork():
        split = torch.rand(4, device=device)
    whole = torch.rand(4, device=device)
    seed_model_parallel(3, ranks.rank())
    assert torch.equal(torch.rand(4, device=device), whole)
    with random_states().fork():
        assert torch.equal(torch.rand(4, device=device), split) and not torch.equal(split, whole)


def _on_rank_1(work: Callable[[], None]) -> None:
    if ranks.rank() == 1:
        work()


def test_a_device_that_is_not_the_current_one() -> None:
    on_devices(_on_rank_1, _other_device)


# -- names and numbers of the public interface --------------------------------------------------------------------------


@pytest.mark.fast_rows("pretend_ccl-2")
@pytest.mark.parametrize(("backend", "world"), [*((backend, 2) for backend in BACKENDS), (network.NAME, 1)])
def test_public_interface(backend: str, world: int) -> None:
    on_devices(device_jobs.interface, backend=backend, world=world)


def _facts() -> None:
    from hf_zero.deepspeed.served.logs import see_memory_usage
    from hf_zero.environment import environment_facts
    from hf_zero.launch.command import _devices

    assert environment_facts()["devices"][f"{pretend.NAME}:1"] == "Pretend accelerator 1, 2.0 GiB"
    assert _devices() == 2
    see_memory_usage("here", force=True)


def test_facts_of_any_accelerator() -> None:
    on_devices(_facts)


# -- Accelerate, told about the device -----------------------------------------------------------------------------------


def _accelerate(zero: dict[str, Any]) -> tuple[list[float], set[str]]:
    """Losses of four steps under an Accelerator, and where its weights are. Accelerate chooses among devices it knows by name."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, PartialState
    from torch.utils.data import DataLoader

    case, device = CASES["gpt2"], ranks.device()
    rows = [{name: value[0].cpu() for name, value in case.rows(index, rows=1).items()} for index in range(16)]
    section = {"stage3_gather_16bit_weights_on_model_save": True, **zero}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": section, "bf16": {"enabled": True}}
    with (
        mock.patch.object(PartialState, "set_device", lambda state: setattr(state, "device", device)),
        mock.patch.object(PartialState, "default_device", device),
    ):
        try:
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), mixed_precision="bf16")
            model = case.build()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
            losses = []
            for batch in loader:
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            devices = {param.device.type for param in model.parameters()}
            accelerator.get_state_dict(model)
            model.destroy()
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
    return losses, devices


@pytest.mark.slow  # fast: `test_offload_changes_nothing`
def test_accelerate_trains_and_offloads_on_a_device() -> None:
    plain = on_devices(_accelerate, {"stage": 2}, group=False)
    assert {str(device) for _, devices in plain for device in devices} == {pretend.NAME}
    offloaded = on_devices(_accelerate, device_jobs.OFFLOADED["zero_optimization"], group=False)
    for mine, other in zip(offloaded, plain, strict=True):
        assert len(mine[0]) == 4 and mine[0] == pytest.approx(other[0], rel=2e-3)
