"""What scripts ask of DeepSpeed's pipeline engine besides training."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.deepspeed.pipe.module import PipelineModule
from hf_zero.deepspeed.served.checkpointing import checkpoint
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from tests.pipeline.ds_pipelines import LayerSpec, Plain, build, feed, loss_of, replica_of, rows, tied_layers
from tests.support import parity, ranks
from tests.support.parity import Run

RUN = Run(1, accumulation=3)


def deepspeed() -> Any:
    import hf_zero.deepspeed

    hf_zero.deepspeed.install_as_deepspeed()
    return importlib.import_module("deepspeed")


def check_evaluation() -> None:
    engine = parity.initialize(build(2), RUN)
    last = engine.is_last_stage()
    torch.manual_seed(5)
    plain = Plain(tied_layers()).eval()
    with torch.no_grad():
        losses = [plain(**rows(0, micro, 0)).item() for micro in range(3)]

    def batches() -> Iterator[Any]:
        return feed(RUN, 0)

    mean = sum(losses) / 3
    assert float(engine.eval_batch(batches())) == pytest.approx(mean, rel=1e-6)
    assert (engine.eval_batch(batches(), bcast_loss=False) is None) != last
    by_part = engine.eval_batch(batches(), reduce_output=None)
    assert by_part == (pytest.approx(losses, rel=1e-6) if last else None)
    loss, logits = engine.eval_batch(batches(), return_logits=True, num_micro_batches=1)
    assert float(loss) == pytest.approx(losses[0], rel=1e-6)
    outputs = engine.eval_batch(batches(), compute_loss=False, reduce_output=None)
    assert (logits is None and outputs is None) if not last else torch.equal(outputs[0], logits) and len(outputs) == 3
    engine.micro_batches = 1
    assert float(engine.eval_batch(batches())) == pytest.approx(losses[0], rel=1e-6)
    with pytest.raises(StateError, match="train_batch.*micro_batches 1.*gradient_accumulation_steps 3"):
        engine.train_batch(batches())
    with pytest.raises(ConfigError, match="micro_batches was set to 0"):
        engine.micro_batches = 0
    engine.micro_batches = RUN.accumulation
    assert engine.micro_batches == 3 and engine.module.training and engine.global_steps == 0
    with pytest.raises(ConfigError, match="'avg' or None"):
        engine.eval_batch(batches(), reduce_output="sum")
    engine.destroy()


def check_calls() -> None:
    ds = deepspeed()
    engine = parity.initialize(build(2), RUN)
    assert isinstance(engine, ds.PipelineEngine) and isinstance(engine.module, ds.pipe.PipelineModule) and engine.pipeline_parallelism
    assert engine.grid.get_stage_id() == engine.stage_id == ranks.rank() // (ranks.world() // 2)
    assert engine.grid.stage_to_global(1) == ranks.world() // 2 + replica_of(2)
    assert engine.mpu.get_data_parallel_world_size() == ranks.world() // 2 == engine.dp_world_size
    assert engine.mpu.get_model_parallel_world_size() == engine.module.num_pipeline_stages() == 2
    assert torch.distributed.get_process_group_ranks(engine.grid.get_data_parallel_group()) == engine.module.topology().get_axis_list(
        "pipe", engine.stage_id
    )
    assert engine.is_first_stage() != engine.is_last_stage()
    for name, call in (("forward", engine), ("backward", engine.backward), ("step", engine.step)):
        with pytest.raises(ds.runtime.pipe.engine.PipelineError, match=rf"PipelineEngine\.{name}\(\).*engine\.train_batch"):
            call(torch.zeros(1))
    with pytest.raises(StateError, match="set_dataloader"):
        engine.train_batch()
    with pytest.raises(ConfigError, match=r"is a list; an iterator is allowed"):
        engine.train_batch([1])
    with pytest.raises(ConfigError, match=r"gave a tuple of 3; allowed is \(inputs, labels\)"):
        engine.train_batch(iter([(1, 2, 3)]))
    engine.destroy()


def check_data() -> None:
    """A loader that starts again, a function of its entries, and training data: each gives the losses of the iterator."""
    data = [{"tokens": tokens, "mask": mask, "labels": labels} for (tokens, mask), labels in feed(RUN, 0, steps=1)]
    losses = []
    for way in ("iterator", "loader", "data iterator"):
        engine = parity.initialize(build(2), RUN)
        engine.set_batch_fn(lambda entry: ((entry["tokens"], entry["mask"]), entry["labels"]))
        if way == "loader":
            engine.set_dataloader(data)
        elif way == "data iterator":
            engine.set_dataiterator(iter(data * 2))
        losses.append([float(engine.train_batch(iter(data) if way == "iterator" else None)) for _ in range(2)])
        engine.destroy()
    assert losses[0] == losses[1] == losses[2]
    samples = [((batch["tokens"][0], batch["mask"][0]), batch["labels"][0]) for batch in data[::2]] * 12
    import hf_zero

    engine, _, loader, _ = hf_zero.initialize(model=build(2), config=RUN.config(), training_data=samples)
    assert len(loader) == 24 // 2 // (ranks.world() // 2)
    assert torch.isfinite(engine.train_batch())
    first = torch.stack([samples[place][0][0] for place in range(replica_of(2), len(samples), ranks.world() // 2)][:2])
    assert torch.equal(next(iter(loader))[0][0], first)  # in the order of the data, so that every stage reads the same
    engine.destroy()


def check_data_that_ends() -> None:
    """Data that ends, or fails, on one stage ends the batch on every one."""
    engine = parity.initialize(build(ranks.world()), RUN)
    reads = engine.is_first_stage() or engine.is_last_stage()
    with pytest.raises(StopIteration):
        engine.train_batch(feed(Run(1, accumulation=2), 0, steps=1) if reads else None)

    def broken() -> Iterator[Any]:
        yield from feed(Run(1, accumulation=2), 0, steps=1)
        raise OSError("the disk is gone")

    with pytest.raises(OSError if engine.is_first_stage() else StateError, match="the disk is gone"):
        engine.train_batch(broken() if engine.is_first_stage() else feed(RUN, 0) if reads else None)
    assert torch.isfinite(engine.train_batch(feed(RUN, 0) if reads else None)) and engine.global_steps == 1
    engine.destroy()


class Counting:
    """A schedule by samples, as Megatron's: ``step`` must be told how many."""

    samples = 0

    def step(self, increment: int) -> None:
        self.samples += increment

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


def check_configured() -> None:
    config = {**RUN.config(), "pipeline": {"activation_checkpoint_interval": 2, "schedule": "GPipe", "pipe_partitioned": False}}
    import hf_zero

    net, schedule = build(2), Counting()
    engine = hf_zero.initialize(model=net, config=config, mpu=net.mpu(), lr_scheduler=schedule)[0]
    assert net.activation_checkpoint_interval == 2
    first = [float(engine.train_batch(feed(RUN, 0))) for _ in range(1)]
    assert schedule.samples == engine.train_batch_size()
    engine.destroy()
    plain = parity.initialize(build(2), RUN)
    assert first == [float(plain.train_batch(feed(RUN, 0)))]
    plain.destroy()


class Reporting(PipelineModule):
    """Reports the greatest logit of each micro-batch beside the loss."""

    def loss_of(self, outputs: Any, labels: Any) -> torch.Tensor:
        self.greatest = outputs.detach().max()
        return super().loss_of(outputs, labels)

    def get_additional_losses(self) -> dict[str, torch.Tensor]:
        return {"greatest": self.greatest}


def check_additional_losses() -> None:
    torch.manual_seed(5)
    engine = parity.initialize(Reporting(tied_layers(), num_stages=2, loss_fn=loss_of, partition_method="uniform"), RUN)
    assert engine.get_additional_losses() is None
    _, logits = engine.eval_batch(feed(RUN, 0), return_logits=True, num_micro_batches=1)
    everyone: list[Any] = [None] * ranks.world()
    torch.distributed.all_gather_object(everyone, None if logits is None else float(logits.max()))
    assert float(engine.get_additional_losses()["greatest"]) == pytest.approx(everyone[-1])
    engine.train_batch(feed(RUN, 0))
    assert list(engine.get_additional_losses()) == ["greatest"]
    engine.destroy()
    engine = parity.initialize(build(2), RUN)
    engine.set_has_attention_mask(True)
    engine.train_batch(feed(RUN, 0))
    assert engine.get_additional_losses() is None
    engine.destroy()


def check_order() -> None:
    """What a stage runs when: 1F1B, or what the configuration names; fewer micro-batches than stages go as GPipe's do."""
    if ranks.world() != 2:
        return
    for schedule, accumulation, first in (("1F1B", 4, "FFBFBFBB"), ("GPipe", 4, "FFFFBBBB"), ("1F1B", 1, "FB")):
        run = Run(1, accumulation=accumulation, extra={"pipeline": {"schedule": schedule}})
        engine = parity.initialize(build(2), run)
        order: list[str] = []

        def noted(module: nn.Module, given: Any, made: Any, order: list[str] = order) -> None:
            if made[0].requires_grad:  # not when shapes are looked at
                order.append("F")
                made[0].register_hook(lambda gradient: order.append("B"))

        block = engine.module.get_submodule("1" if engine.is_first_stage() else "4")
        block.register_forward_hook(noted)
        engine.train_batch(feed(run, 0))
        assert "".join(order) == (first if engine.is_first_stage() or schedule == "GPipe" else "FB" * accumulation)
        engine.destroy()


def check_weights_without_seed() -> None:
    """Where ranks start from other random numbers, tied weights are the first stage's, and data-parallel ranks are alike."""
    torch.manual_seed(100 + ranks.rank())
    net = PipelineModule(tied_layers(), num_stages=2, loss_fn=loss_of)
    engine = parity.initialize(net, RUN)
    assert engine.get_parallel_world_sizes() == {"dp": ranks.world() // 2, "tp": 1, "pp": 2}
    tied = net.get_parameter("tied_modules.embed.tokens.weight").detach().clone()
    everyone: list[Any] = [None] * ranks.world()
    torch.distributed.all_gather_object(everyone, tied)
    assert all(torch.equal(other, tied) for other in everyone) and tied.shape == (11, 8)
    assert torch.isfinite(engine.train_batch(feed(RUN, replica_of(2))))
    torch.distributed.all_gather_object(everyone, net.get_parameter("tied_modules.embed.tokens.weight").detach())
    assert all(torch.equal(other, everyone[0]) for other in everyone) and not torch.equal(everyone[0], tied)
    engine.destroy()


def check_called_by_itself() -> None:
    batch = rows(0, 0, 0)
    net, plain = build(1), Plain(tied_layers())
    plain.load_state_dict(net.state_dict())
    logits = net((batch["tokens"], batch["mask"]))
    loss = plain(**batch)
    assert torch.equal(loss_of(logits, batch["labels"]), loss)
    assert torch.equal(net((batch["tokens"], batch["mask"]), batch["labels"]), loss)


def check_given_modules() -> None:
    """Of modules that are given this rank keeps its own; the list stays as it was, and what is shared stays shared."""
    layers = [nn.Linear(4, 4) for _ in range(4)]
    layers[3].weight = layers[0].weight
    values = [layer.weight.detach().clone() for layer in layers]
    net = PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=nn.MSELoss())
    own = range(2) if net.stage_id == 0 else range(2, 4)
    shared = {0, 3}
    for place, layer in enumerate(layers):
        assert torch.equal(layer.weight, values[place])
        held = net.get_submodule(str(place))
        assert (held is layer) == (place in own) and (held.weight.numel() == 16) == (place in own or place in shared)
    assert net.get_submodule("0").weight is net.get_submodule("3").weight is layers[0].weight
    net.activation_checkpoint_func = checkpoint
    assert net.activation_checkpoint_func is net.recomputation.function is checkpoint
    assert net.forward_funcs == [layers[place] for place in own]
    assert net.mpu().pp_group == [ranks.rank() % (ranks.world() // 2) + stage * (ranks.world() // 2) for stage in range(2)]


def check_all() -> None:
    check_given_modules()
    check_order()
    check_additional_losses()
    check_weights_without_seed()
    check_called_by_itself()
    check_evaluation()
    check_calls()
    check_data()
    check_data_that_ends()
    check_configured()


@pytest.mark.fast_rows("4")
@pytest.mark.parametrize("world", [2, 4])
def test_calls_of_scripts(world: int) -> None:
    ranks.run_ranks(check_all, world)


class Scalar(nn.Module):
    """A layer with a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def check_refusals() -> None:
    from hf_zero.deepspeed.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

    layers = [nn.Linear(2, 2) for _ in range(3)]
    for make, text in (
        (lambda: PipelineModule(layers), "num_stages= or topology="),
        (lambda: PipelineModule(layers, num_stages=3), r"PipelineModule\(num_stages\) is 3, which does not divide the 2 ranks; 1, 2 would"),
        (lambda: PipelineModule(layers[:1], num_stages=2), r"1 layer\(s\) over 2 stages"),
        (lambda: PipelineModule(layers, topology=PipeDataParallelTopology(2, 2)), "pipe 2 x data 2 has 4 ranks, but there are 2"),
        (lambda: PipelineModule(layers, topology=ProcessTopology(["stage"], [2])), "axes pipe and data"),
        (lambda: PipelineModule(layers, num_stages=1, topology=PipeDataParallelTopology(2, 1)), "different numbers of stages"),
        (lambda: PipelineModule(layers, num_stages=2).stage_owner(3), "layers are numbered from 0 to 2"),
    ):
        with pytest.raises(ConfigError, match=text):
            make()
    with pytest.raises(UnsupportedError, match=r"parameter scale of layer 1 \(Scalar\).*shape \(1,\)"):
        PipelineModule([nn.Linear(2, 2), LayerSpec(Scalar)], num_stages=2)
    divided = PipelineModule(layers, topology=PipeModelDataParallelTopology(1, 2, 1))
    assert divided.mpu().get_slice_parallel_world_size() == 2  # what takes the list apart asks for no more
    with pytest.raises(UnsupportedError, match="layers split over the ranks of a 'model' axis"):
        parity.initialize(divided, Run(1))
    for stages in (1, 2):
        with pytest.raises(UnsupportedError, match="PipelineModule.*stage 3 exclude each other"):
            parity.initialize(build(stages), Run(3))
    with pytest.raises(ConfigError, match=r"PipelineModule\(num_stages\): pp 2"):
        parity.initialize(build(2), Run(1, extra={"pipeline": {"stages": 4}}))
    with pytest.raises(ConfigError, match="has one stage on each rank"):
        parity.initialize(build(2), Run(1, extra={"pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 2}}))
    engine = parity.initialize(build(1, loss_fn=lambda logits, labels: logits), Run(0))
    with pytest.raises(
        ConfigError, match=r"the result of loss_fn is the loss and must be a tensor of one number, but is a tensor \(2, 5, 11\)"
    ):
        engine.train_batch(feed(Run(0), 0))


def test_what_does_not_fit_is_one_clear_error() -> None:
    ranks.run_ranks(check_refusals, 2)
