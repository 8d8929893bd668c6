"""Training that hangs on NCCL unless all ranks issue all collectives in one order, whatever their data and however fast they are.

The package takes its way for NCCL here, over gloo: a wait stops the rank, as it stops the compute stream of a device. Models are deep
enough for several gathers and reductions to stand between the ranks: 8 and more blocks that one rank skips. Each run is also
compared with plain PyTorch, and its collectives with the rules of NCCL (``tests/support/collective_order.py``), as in every job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import pretend
from tests.pretend import network
from tests.support import ranks
from tests.support.models import CASES, LENGTH, Batch, Block, Mlp, class_loss
from tests.support.multimodal import feed_of, llava, llava_batch, loss, seeded
from tests.support.parity import Run, Trace, check, check_training, collect, initialize, mean_over_ranks
from tests.support.rows import slow_but, thinned
from tests.support.skipped_blocks import Chosen, TwoTowers, loss_of_choice

ALWAYS = 4  # blocks that every rank runs, behind those that some skip
# Nothing stays gathered from forward to backward (``SMALL_MODEL``); one block of about 1100 elements is gathered ahead of its use, or four.
LIMITS: dict[str, dict[str, Any]] = {
    "one ahead": {"stage3_prefetch_bucket_size": 1, "stage3_max_live_parameters": 4000},
    "four ahead": {"stage3_prefetch_bucket_size": 4500},
}


def on_ranks(function: Callable[..., Any], *args: Any, device: str = "cpu") -> None:
    """Run ``function`` on two ranks."""
    env = {"HF_ZERO_TEST_BACKEND": network.NAME, "HF_ZERO_TEST_DEVICE": device}
    ranks.run_ranks(function, 2, *args, env=env)


def run_of(limits: str, **settings: Any) -> Run:
    return Run(stage=3, extra={"zero_optimization": LIMITS[limits]}, **settings)


def _takes_the_way_for_nccl() -> None:
    from hf_zero.comm.back_end import NativeCollectives

    engine = initialize(CASES["mlp"].build(), Run(stage=3))
    assert isinstance(engine.collectives, NativeCollectives)
    engine.destroy()


def test_the_package_takes_its_way_for_nccl() -> None:
    on_ranks(_takes_the_way_for_nccl)


# -- blocks that some ranks skip --------------------------------------------------------------------------------------------


def in_turns(blocks: int, step: int, micro: int, rank: int) -> list[int]:
    """All but the last few are skipped by one rank, then by the other."""
    return list(range(blocks if rank == (step + micro) % 2 else 0, blocks + ALWAYS))


def last_in_turns(blocks: int, step: int, micro: int, rank: int) -> list[int]:
    """As above, and what may be skipped comes last in forward, so first in backward."""
    return list(range(ALWAYS if rank == (step + micro) % 2 else blocks + ALWAYS))


def half_in_any_order(blocks: int, step: int, micro: int, rank: int) -> list[int]:
    """Half of the blocks, in an order of each rank's own."""
    return torch.randperm(blocks, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))[: blocks // 2].tolist()


def drawn(blocks: int, step: int, micro: int, rank: int) -> list[int]:
    """Each block is run or not."""
    kept = torch.rand(blocks, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)) < 0.5
    return [index for index in range(blocks) if kept[index]]


CHOICES = {function.__name__: function for function in (in_turns, last_in_turns, half_in_any_order, drawn)}


def _skips(choice: str, blocks: int, checkpointing: bool, run: Run) -> None:
    total = blocks + (ALWAYS if "turns" in choice else 0)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Chosen(checkpointing, blocks=total)

    def feed(step: int, micro: int, rank: int) -> Batch:
        chosen = torch.tensor(CHOICES[choice](blocks, step, micro, rank), dtype=torch.long)
        return {**CASES["mlp"].rows(step, micro, rank), "choice": chosen}

    check_training(build, feed, loss_of_choice, run, label=choice)


@pytest.mark.fast_rows("one ahead-tower3", "four ahead-tower4")
@thinned("one ahead", limits=LIMITS, tower=[("in_turns", 12), ("last_in_turns", 12), ("drawn", 16), ("in_turns", 24)])
def test_towers_that_ranks_skip_in_turns(limits: str, tower: tuple[str, int]) -> None:
    on_ranks(_skips, *tower, False, run_of(limits, accumulation=2, clip=0.1))


@pytest.mark.parametrize("limits", slow_but(LIMITS, "four ahead"))
def test_experts_in_an_order_of_each_ranks_own(limits: str) -> None:
    on_ranks(_skips, "half_in_any_order", 16, False, run_of(limits, accumulation=2, clip=0.1))


@pytest.mark.fast_rows("drawn-16-four ahead")
@pytest.mark.parametrize(("choice", "blocks", "limits"), [("in_turns", 12, "one ahead"), ("drawn", 16, "four ahead")])
def test_skipped_blocks_under_activation_checkpointing(choice: str, blocks: int, limits: str) -> None:
    on_ranks(_skips, choice, blocks, True, run_of(limits, accumulation=2))


@pytest.mark.skipif(bool(pretend.missing()), reason=pretend.missing())
def test_towers_that_ranks_skip_on_a_device() -> None:
    """The pretend network stops the rank at each call, so it hangs at the first difference of two orders, even where nobody waits."""
    run = run_of("four ahead", dtype="bf16", steps=2)
    on_ranks(_skips, "in_turns", 12, False, run, device=pretend.NAME)


# -- an image on some ranks -------------------------------------------------------------------------------------------------


def _two_towers(run: Run) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return TwoTowers(8, 8)

    def feed(step: int, micro: int, rank: int) -> Batch:
        pixels = rank > 0 or (step + micro) % 2 == 1
        return {**CASES["mlp"].rows(step, micro, rank), "choice": torch.ones(int(pixels))}

    check_training(build, feed, loss_of_choice, run, label="two towers")


def _llava(run: Run) -> None:
    check_training(lambda: seeded(lambda: llava(layers=8)), feed_of(llava_batch), loss, run, label="llava")


@pytest.mark.fast_rows("one ahead-_two_towers", "four ahead-_llava")
@thinned("four ahead", limits=LIMITS, model=[_two_towers, _llava])
def test_a_rank_without_an_image(limits: str, model: Callable[[Run], None]) -> None:
    on_ranks(model, run_of(limits, accumulation=2, clip=0.1))


# -- two engines ------------------------------------------------------------------------------------------------------------


class _Adversaries:
    """A generator and a critic in turns, each rank running blocks of its own choice; through the engines or in plain PyTorch.

    The generator's loss goes back through both. The critic's gradients of it are thrown away.
    """

    def __init__(self, blocks: int, run: Run, who_skips: str) -> None:
        self.blocks, self.run, self.who_skips = blocks, run, who_skips
        torch.manual_seed(0)
        self.generator, self.critic = Chosen(blocks=blocks), Chosen(blocks=blocks)
        self.generator.head = nn.Linear(16, LENGTH)  # the critic reads what it makes

    def losses(self, generator: nn.Module, critic: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
        """The critic's loss, then the generator's; the caller updates after each."""
        everything = list(range(self.blocks))
        chosen = in_turns(self.blocks - ALWAYS, step, 0, rank)
        own = torch.tensor(chosen if self.who_skips == "generator" else everything)
        judged = torch.tensor(chosen if self.who_skips == "critic" else everything)
        inputs = CASES["mlp"].rows(step, 0, rank)["inputs"]
        with torch.no_grad():
            made = generator(inputs, own)
        yield critic(made, judged).square().mean() + (critic(inputs, judged) - 1).square().mean()
        yield (critic(generator(inputs, own), judged) - 1).square().mean()

    def through_engines(self) -> list[Trace]:
        """What each leaves: the critic's trace, then the generator's."""
        critic, generator = initialize(self.critic, self.run), initialize(self.generator, self.run)
        traces = [Trace(), Trace()]
        for step in range(self.run.steps):
            turns = zip((critic, generator), traces, self.losses(generator, critic, step, ranks.rank()), strict=True)
            for engine, trace, found in turns:
                engine.backward(found)
                engine.step()
                critic.optimizer.zero_grad()
                trace.losses.append(mean_over_ranks([found.item()]))
                trace.norms.append(float(engine.get_global_grad_norm()))
                trace.skipped.append(False)
        for engine, trace in zip((critic, generator), traces, strict=True):
            collect(engine, trace)
            engine.destroy()
        return traces

    def plain(self, world: int) -> list[Trace]:
        """The same in one process, the ranks' parts one by one."""
        pair = (self.critic, self.generator)
        settings = {"lr": self.run.lr, "betas": (0.9, 0.99), "eps": self.run.eps, "weight_decay": self.run.weight_decay}
        optimizers = [torch.optim.AdamW(model.parameters(), foreach=False, **settings) for model in pair]
        traces = [Trace(), Trace()]
        for step in range(self.run.steps):
            parts = [self.losses(self.generator, self.critic, step, rank) for rank in range(world)]
            for model, optimizer, trace in zip(pair, optimizers, traces, strict=True):
                values = []
                for part in parts:
                    found = next(part)
                    (found / world).backward()
                    values.append(found.item())
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                norms = [parameter.grad.double().norm() for parameter in model.parameters()]
                optimizer.step()
                for other in pair:
                    other.zero_grad()
                trace.losses.append(sum(values) / world)
                trace.norms.append(torch.linalg.vector_norm(torch.stack(norms)).item())
                trace.skipped.append(False)
        for model, trace in zip(pair, traces, strict=True):
            trace.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            trace.masters = trace.weights
        return traces


def _adversaries(who_skips: str, run: Run) -> None:
    traces = _Adversaries(12, run, who_skips).through_engines()
    if ranks.rank() == 0:
        for trace, expected, name in zip(
            traces, _Adversaries(12, run, who_skips).plain(ranks.world()), ("critic", "generator"), strict=True
        ):
            check(trace, expected, run, name)


@pytest.mark.fast_rows("one ahead-critic")
@thinned("one ahead", limits=LIMITS, who_skips=["generator", "nobody", "critic"])
def test_two_engines_in_one_backward(limits: str, who_skips: str) -> None:
    on_ranks(_adversaries, who_skips, run_of(limits))


# -- a script's own collectives in forward ------------------------------------------------------------------------------------


class Counted(Mlp):
    """Asks in each block how many ranks there are, as layers that share statistics do."""

    def __init__(self, blocks: int, width: int, talks: bool) -> None:
        super().__init__(width=width, blocks=blocks)
        for block in self.blocks:
            block.talks = talks
            block.register_forward_hook(_count_ranks)


def _count_ranks(block: Block, _inputs: Any, output: Tensor) -> Tensor:
    if not block.talks:
        return output
    here = torch.ones(1, device=output.device)
    dist.all_reduce(here)
    return output * (here / dist.get_world_size())


@contextmanager
def _slow_updates(seconds: float) -> Iterator[None]:
    """Rank 1's thread takes longer for each unit, in step and, with copies, in backward."""
    from hf_zero.offload.speculation import Speculation
    from hf_zero.offload.updates import UnitUpdate

    def slow(method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            time.sleep(seconds * ranks.rank())
            method(*args)

        return call

    with mock.patch.object(UnitUpdate, "run", slow(UnitUpdate.run)), mock.patch.object(Speculation, "step", slow(Speculation.step)):
        yield


def _talks_in_forward(run: Run) -> None:
    def build(talks: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return Counted(12, 16, talks)

    models = [build(talks=True)]  # the engine's; the reference is alone
    with _slow_updates(0.02):
        check_training(lambda: models.pop() if models else build(), CASES["mlp"].rows, class_loss, run, label="all-reduce in forward")


@pytest.mark.fast_rows("full")
@pytest.mark.parametrize("overlap", ["none", "forward", "full"])
def test_an_all_reduce_in_forward_beside_updates_that_are_late(overlap: str) -> None:
    way = {**LIMITS["four ahead"], "offload_optimizer": {"device": "cpu"}}
    on_ranks(_talks_in_forward, Run(stage=3, steps=4, extra={"zero_optimization": way, "hf_zero": {"offload_overlap": overlap}}))


def test_an_all_reduce_in_forward_beside_blocks_that_are_gathered_ahead() -> None:
    on_ranks(_talks_in_forward, run_of("four ahead", accumulation=2))
