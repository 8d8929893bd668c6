"""ParallelismConfig beside a DeepSpeed plugin: data, losses, metrics and torch's mesh on four ranks, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.integrations.parallelism import validate_launch
from tests.support import parity, ranks
from tests.support.models import CASES
from tests.support.sequences import build, llama
from tests.support.tp_trainer import rows
from tests.support.trainers import clean_state

pytest.importorskip("accelerate", minversion="1.12")

BATCH, ROWS, EVALUATED, ACCUMULATION, SUMS = 2, 16, 9, 2, [int(row["input_ids"].sum()) for row in rows(16)]


@contextmanager
def variables(sizes: dict[str, int]) -> Iterator[None]:
    """The environment as ``accelerate launch`` makes it."""
    given = {f"PARALLELISM_CONFIG_{axis.upper()}_SIZE": str(size) for axis, size in sizes.items()}
    if sizes:
        given["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            os.environ.pop(name, None)


def plugin(stage: int, **keys: Any) -> Any:
    from accelerate import DeepSpeedPlugin

    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True, **parity.SMALL_MODEL},
        **keys,
    }
    return DeepSpeedPlugin(hf_ds_config=config)


def mesh_of(accelerator: Any, engine: Any) -> dict[str, int]:
    """Sizes of torch's mesh, whose groups are those of the engine's ranks."""
    mesh, topology = accelerator.torch_device_mesh, engine.collectives.topology
    axes = {"dp_shard": topology, "dp_replicate": topology.replicate, "tp": topology.model}
    for name in mesh.mesh_dim_names:
        assert tuple(dist.get_process_group_ranks(mesh[name].get_group())) == axes[name].ranks, name
        assert mesh.get_local_rank(name) == axes[name].rank, name
    assert mesh["dp"].size() == engine.train_batch_size() // BATCH // ACCUMULATION
    counted = torch.ones(())
    dist.all_reduce(counted, group=mesh["dp"].get_group())
    assert counted == mesh["dp"].size()
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def loop(stage: int, sizes: dict[str, int], how: str) -> dict[str, Any]:
    """Four micro-steps for each rank of four that shares nothing, and an evaluation."""
    from accelerate import Accelerator, ParallelismConfig

    given = {"parallelism_config": ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()})} if how == "object" else {}
    with clean_state(), variables(sizes if how == "variables" else {}):
        accelerator = Accelerator(deepspeed_plugin=plugin(stage), **given)
        model = CASES["gpt2"].build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loaders = DataLoader(rows(ROWS), batch_size=BATCH), DataLoader(rows(EVALUATED), batch_size=BATCH)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(model, optimizer, *loaders, scheduler)
        found: dict[str, Any] = {"mesh": mesh_of(accelerator, model), "losses": [], "norms": [], "seen": [], "metrics": []}
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found["norms"].append(parity.as_float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found["losses"].append(float(loss.detach()))
            found["seen"] += batch["input_ids"].sum(-1).tolist()
        for batch in eval_loader:
            found["metrics"] += accelerator.gather_for_metrics(batch["input_ids"].sum(-1)).tolist()
        found["state"] = accelerator.get_state_dict(model) if accelerator.is_main_process or stage == 3 or "tp" in sizes else None
        found["everyone"] = accelerator.gather(torch.tensor(accelerator.process_index)).tolist()
        accelerator.free_memory()
    return found


def one_rank(replicas: int) -> dict[str, Any]:
    """Losses of each replica, norms, and the weights."""
    model = CASES["gpt2"].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = list(DataLoader(rows(ROWS), batch_size=BATCH))
    losses: list[list[float]] = [[] for _ in range(replicas)]
    norms = []
    for number, batch in enumerate(batches):
        loss = model(**batch).loss
        (loss / ACCUMULATION / replicas).backward()
        losses[number % replicas].append(loss.item())
        if (number + 1) % (ACCUMULATION * replicas) == 0:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "state": model.state_dict()}


@pytest.mark.fast_rows("3-sizes1-variables-mesh1")
@pytest.mark.parametrize(
    ("stage", "sizes", "how", "mesh"),
    [
        (2, {"tp": 2}, "object", {"dp_shard": 2, "tp": 2}),
        (3, {"tp": 2, "dp_shard": 2}, "variables", {"dp_shard": 2, "tp": 2}),
        (2, {"dp_shard": 4}, "object", {"dp_shard": 4}),
        (1, {"dp_replicate": 2, "dp_shard": 2}, "object", {"dp_replicate": 2, "dp_shard": 2}),
        (2, {"dp_replicate": 2, "dp_shard": 2}, "variables", {"dp_replicate": 2, "dp_shard": 2}),
        (3, {"dp_replicate": 2, "dp_shard": 2}, "object", {"dp_replicate": 2, "dp_shard": 2}),
    ],
)
def test_loop_is_that_of_one_rank(stage: int, sizes: dict[str, int], how: str, mesh: dict[str, int]) -> None:
    _compare(4, stage, sizes, how, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_three_axes_on_eight_ranks(stage: int) -> None:
    sizes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    _compare(8, stage, sizes, "variables", sizes)


def _compare(world: int, stage: int, sizes: dict[str, int], how: str, mesh: dict[str, int]) -> None:
    sharers = sizes.get("tp", 1)
    expected = one_rank(world // sharers)
    found = ranks.run_ranks(loop, world, stage, sizes, how, group=False)
    for rank, run in enumerate(found):
        assert run["mesh"] == mesh
        assert run["losses"] == pytest.approx(expected["losses"][rank // sharers], rel=1e-4)
        assert run["norms"] == pytest.approx(expected["norms"], rel=1e-3)
        assert run["metrics"] == SUMS[:EVALUATED], "each row once, in order, none of those that fill the last batch"
        assert run["everyone"] == list(range(world))
    assert sorted(sum((run["seen"] for run in found[::sharers]), [])) == sorted(SUMS), "each sample once an epoch"
    for name, value in expected["state"].items():
        torch.testing.assert_close(found[0]["state"][name], value, rtol=2e-3, atol=2e-4)


def interrupted(folder: str, stage: int) -> None:
    """``save_state`` and ``load_state`` in two shard groups of two: the steps after a load are those after the save, bit for bit."""
    from accelerate import Accelerator, ParallelismConfig

    with clean_state():
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        accelerator = Accelerator(deepspeed_plugin=plugin(stage, bf16={"enabled": True}), parallelism_config=config)
        model = CASES["gpt2"].build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, DataLoader(rows(ROWS), batch_size=BATCH), scheduler)
        counted = Counted()
        accelerator.register_for_checkpointing(counted)

        def epoch() -> list[float]:
            seen = []
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        seen += [parity.as_float(model.get_global_grad_norm()), scheduler.get_last_lr()[0]]
            counted.epochs += 1
            return seen

        epoch()
        accelerator.save_state(folder)
        saved, expected, end = parity.full_masters(model), epoch(), parity.full_masters(model)
        assert expected and not any(torch.equal(saved[name], end[name]) for name in saved)
        accelerator.load_state(folder)
        assert counted.epochs == 1
        assert all(torch.equal(value, saved[name]) for name, value in parity.full_masters(model).items())
        assert epoch() == expected
        assert all(torch.equal(value, end[name]) for name, value in parity.full_masters(model).items())
        accelerator.free_memory()


class Counted:
    """An object of the script's own that is saved beside the engine."""

    def __init__(self) -> None:
        self.epochs = 0

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


@pytest.mark.slow  # fast: test_checkpoint_replicas.py
@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_states_are_saved_and_loaded_in_shard_groups(tmp_path: Path, stage: int) -> None:
    ranks.run_ranks(interrupted, 4, str(tmp_path), stage, group=False)


def over_slices(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Sizes of torch's mesh, and how often a batch is trained on, where ranks share sequences."""
    from accelerate import Accelerator, ParallelismConfig

    with clean_state():
        config = ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()})
        accelerator = Accelerator(deepspeed_plugin=plugin(2), parallelism_config=config)
        model = build(llama)
        loader = DataLoader(rows(ROWS), batch_size=BATCH)
        engine, _, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
        mesh, topology = accelerator.torch_device_mesh, engine.collectives.topology
        assert tuple(dist.get_process_group_ranks(mesh["sp"].get_group())) == topology.sequence.ranks
        groups = {"dp_replicate": topology.replicate, "dp_shard": topology if "dp_replicate" not in sizes else None}
        for name, axis in groups.items():
            if axis is not None and name in mesh.mesh_dim_names:
                assert set(dist.get_process_group_ranks(mesh[name].get_group())) <= set(axis.ranks)
        assert engine.train_batch_size() == BATCH * ACCUMULATION * 2 == BATCH * ACCUMULATION * config.data_parallel_size
        assert accelerator.data_parallel_rank == (topology.replicate.rank if topology.replicate else 0)
        accelerator.free_memory()
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)), len(loader)


@pytest.mark.parametrize(
    ("sizes", "mesh"), [({"sp": 2}, {"dp_shard": 2, "sp": 2}), ({"dp_replicate": 2, "sp": 2}, {"dp_replicate": 2, "sp": 2})]
)
def test_ranks_that_share_sequences_are_an_axis_of_the_mesh(sizes: dict[str, int], mesh: dict[str, int]) -> None:
    for found, batches in ranks.run_ranks(over_slices, 4, sizes, group=False):
        assert found == mesh and batches == ROWS // BATCH // 2


def refused() -> list[str]:
    from accelerate import Accelerator, ParallelismConfig

    def start(sizes: dict[str, int], environment: dict[str, int] | None = None, **keys: Any) -> str:
        config = ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()}) if sizes else None
        with clean_state(), variables(environment or {}), pytest.raises((ConfigError, UnsupportedError)) as error:
            if not sizes:
                os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
            Accelerator(deepspeed_plugin=plugin(2, **keys), parallelism_config=config)
        return str(error.value)

    def twice() -> str:
        with clean_state(), pytest.raises(ConfigError) as error:
            Accelerator(deepspeed_plugin=plugin(2), parallelism_config=ParallelismConfig(tp_size=2))
            Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
            Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=4))
        return str(error.value)

    return [
        start({"cp": 2}, pipeline={"stages": 2}),
        start({"tp": 2}, tensor_parallel={"autotp_size": 4}),
        start({"dp_shard": 4}, environment={"dp_shard": 2}),
        start({"dp_shard": 2}),
        start({"tp": 2, "dp_shard": 4}),
        start({"dp_shard": 2, "tp": 2}, sequence_parallel_size=2),
        start({"dp_shard": 2}, sequence_parallel_size=2),
        start({"dp_replicate": 2, "dp_shard": 2}, zero_optimization={"stage": 2, "mics_shard_size": 4}),
        start({}, environment={"tp": 2}),
        twice(),
    ]


def test_what_does_not_fit_or_is_not_served_is_refused_on_every_rank() -> None:
    found = ranks.run_ranks(refused, 4, group=False)
    texts = [
        "a pipeline of 2 stages and context parallelism (ParallelismConfig.cp_size: cp 2) cannot be combined",
        "- ParallelismConfig.tp_size: tp 2\n- tensor_parallel.autotp_size: tp 4\n",
        "- ParallelismConfig.dp_shard_size: dp_shard 4\n- PARALLELISM_CONFIG_DP_SHARD_SIZE: dp_shard 2\n",
        "dp_shard 2 x cp 1 x sp 1 x tp 1 makes 2 ranks; dp_shard 4 would fit",
        "dp_shard 4 x cp 1 x sp 1 x tp 2 makes 8 ranks; dp_shard 2 would fit",
        "ParallelismConfig.tp_size is 2 and sequence_parallel_size is 2, tensor and sequence parallelism: the two cannot be combined",
        "sp_size of the ParallelismConfig is 1. Set sp_size=2",
        "dp_replicate 2 x shard group 4 makes 8 data-parallel ranks; shard group 2 would fit",
        "PARALLELISM_CONFIG_TP_SIZE is 2, but accelerate made no ParallelismConfig from it",
        "another ParallelismConfig was given",
    ]
    for messages in found:
        assert [text for text, message in zip(texts, messages, strict=True) if text not in message] == []


def sharded_before() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import hf_zero
    from hf_zero.tensor_parallel.split import tp_model_init

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Shard(0), Shard(1)]))
    with pytest.raises(UnsupportedError) as error:
        hf_zero.initialize(
            model=model, config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
        )
    with pytest.raises(UnsupportedError, match="is a DTensor over"):
        tp_model_init(model, 2)
    return str(error.value)


def test_a_model_that_is_sharded_already_gets_a_clear_answer() -> None:
    for text in ranks.run_ranks(sharded_before, 4):
        assert "parameter '1.weight' is a DTensor over fsdp 2, tp 2: the model was already divided over ranks" in text
        assert '"tensor_parallel": {"autotp_size": 2}' in text and "distributed_config" in text


def launch_flags(**given: Any) -> SimpleNamespace:
    flags = {"use_deepspeed": False, "use_fsdp": False, "use_parallelism_config": False, "parallelism_config_tp_size": 1}
    return SimpleNamespace(**{**flags, **given})


def test_accelerate_launch_takes_the_sizes_beside_use_deepspeed() -> None:
    def check(args: Any, **read: Any) -> str:
        """accelerate's, and what it would read in the file of `accelerate config`."""
        if args.use_parallelism_config and not args.use_fsdp:
            raise ValueError("You cannot use `--use_parallelism_config`")
        vars(args).update(read)
        return "checked"

    for given, read, served in (
        ({"use_deepspeed": True}, {}, False),
        ({"use_deepspeed": True, "use_parallelism_config": "true"}, {}, True),
        ({"use_deepspeed": True, "parallelism_config_tp_size": 2}, {}, True),
        ({"use_deepspeed": True}, {"parallelism_config_tp_size": 2}, True),
        ({"use_parallelism_config": "true"}, {"use_deepspeed": True}, True),
        ({}, {"use_deepspeed": True, "use_parallelism_config": True}, True),
        ({"parallelism_config_tp_size": 2}, {}, False),
        ({"use_fsdp": True, "use_parallelism_config": True}, {}, True),
    ):
        args = launch_flags(**given)
        assert validate_launch(partial(check, **read), args) == "checked"
        assert bool(args.use_parallelism_config) is served, (given, read)
    with pytest.raises(ValueError, match="You cannot"):
        validate_launch(check, launch_flags(use_parallelism_config=True))
    assert validate_launch(lambda args: args, SimpleNamespace(use_deepspeed=True)) == SimpleNamespace(use_deepspeed=True)  # accelerate 1.6
