"""The engine of one replica group beside pretended other groups: averages, failures, received states, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.config.resolve import resolve
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.replica_groups import groups as module
from hf_zero.replica_groups.groups import ReplicaGroups
from hf_zero.replica_groups.quorum import Formed, Member, Quorum
from hf_zero.replica_groups.sampler import ReplicaSampler
from hf_zero.replica_groups.transfer import receive_state, send_state
from tests.support import ranks
from tests.support.checkpoints import differences, full_state, start, steps
from tests.support.models import LENGTH, class_loss


class _Pretended:
    """A quorum of groups 0 and 1, whose second group has the same gradients with the opposite sign, or has gone."""

    def __init__(self, group: int, net: Any) -> None:
        self.net, self.failures, self.different = net, 0, False
        self.sent: list[torch.Tensor] = []
        self.members = (Member(0, 0, 0, False, False), Member(1, 0, 0, False, False))
        self.log: list[str] = []
        self.averages = 0

    def form(self, step: int, digest: int, fresh: bool) -> Formed:
        self.log.append(f"form {len(self.members)}")
        return Formed(self.members, step, None, ())

    def any_failed(self) -> bool:
        return bool(self.net.any_rank(False, "exchange"))  # the ranks meet, as in the real one

    def attempt(self, work: Callable[[], Any]) -> Any:
        return work()

    def largest(self, numbers: list[int]) -> list[int]:
        return [numbers[0] + self.different, *numbers[1:]]

    def average(self, tensors: list[torch.Tensor]) -> None:
        self.averages += 1
        for tensor in tensors:
            if self.failures > 0:
                tensor.fill_(float("nan"))
            elif len(self.members) == 2:
                tensor.zero_()

    def vote(self) -> bool:
        self.failures -= 1
        if self.failures >= 0:
            self.members = self.members[:1]
        return self.failures < 0

    def close(self) -> None:
        self.log.append("closed")

    def send(self, data: torch.Tensor, target: int) -> None:
        self.sent.append(data.clone())

    def receive(self, nbytes: int, source: int) -> torch.Tensor:
        data = self.sent.pop(0)
        assert data.numel() == nbytes
        return data


def _one_group(stage: int) -> None:
    real, module.Quorum = module.Quorum, _Pretended  # type: ignore[misc, assignment]
    import os

    os.environ.update({"REPLICA_GROUP_ID": "0", "TORCHFT_LIGHTHOUSE": "http://localhost:1", "NUM_REPLICA_GROUPS": "2"})
    try:
        alone, together = start(stage), start(stage, hf_zero={"replicas": "torchft"})
        groups: Any = together.stepper.groups
        quorum: Any = groups._quorum
        with pytest.raises(ConfigError, match="two training engines"):
            ReplicaGroups(together)
        # Both groups: the mean of gradients and their opposites is zero, and samples of two groups are counted.
        steps(together, 0, 1)
        assert together.get_global_grad_norm() == 0.0
        assert together.global_samples == 2 * together.samples_per_step and groups.members == (0, 1)
        # A norm that is asked for before the step averages once; gradients that are then discarded do not save the next average.
        for discards, averages in ((True, 2), (False, 3)):
            together.backward(class_loss(together, {"inputs": torch.ones(2, LENGTH), "labels": torch.zeros(2, dtype=torch.long)}))
            assert float(together.stepper.measure()) == 0.0 and quorum.averages == averages
            together.zero_grad() if discards else together.step()
        assert together.global_steps == 2 and quorum.averages == 3
        together.destroy()
        assert quorum.log[-1] == "closed"
        # The other group dies in the average: this one takes its own gradients, which the failed average has not changed.
        together = start(stage, hf_zero={"replicas": "torchft"})
        groups, quorum = together.stepper.groups, together.stepper.groups._quorum
        quorum.failures = 1
        steps(together, 0, 1)
        quorum.failures = 0
        steps(together, 1, 2)
        steps(alone, 0, 3)
        assert quorum.log == ["form 2", "form 1", "form 1", "form 1"]
        assert together.global_samples == alone.global_samples and groups.members == (0,)
        assert differences(full_state(together), full_state(alone)) == []
        quorum.different = True
        with pytest.raises(StateError, match=r"not alike at step 4: micro-steps from 1 to 2, 1 in group 0"):
            steps(together, 3, 1)
        together.destroy()
    finally:
        module.Quorum = real  # type: ignore[misc]
    # A state goes to a fresh engine through a network, bit for bit, at the same layout.
    network: Any = _Pretended(0, alone.collectives.data)
    fresh = start(stage, seed=1)
    send_state(alone.checkpoints.state_of(alone), {"digest": 7}, network, (1,))
    received = receive_state(fresh.checkpoints.state_of(fresh), network, 0)
    assert received is not None and received["digest"] == 7 and received["counters"]["global_steps"] == 3
    assert not network.sent
    fresh.progress.restore(received["counters"])
    fresh.accumulation.micro_steps = received["counters"]["micro_steps"]
    assert differences(full_state(fresh), full_state(alone)) == []


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_beside_other_groups(stage: int) -> None:
    ranks.run_ranks(_one_group, 2, stage)


def _all_groups_started_again(folder: str) -> None:
    real, module.Quorum = module.Quorum, _Pretended  # type: ignore[misc, assignment]
    import os

    os.environ.update({"REPLICA_GROUP_ID": "0", "TORCHFT_LIGHTHOUSE": "http://localhost:1", "NUM_REPLICA_GROUPS": "2"})

    def indices() -> Iterator[int]:
        return iter(ReplicaSampler(80, 2, ranks=2, rank=ranks.rank(), shuffle=False))

    def numbers(engine: Any, sampler: Iterator[int], count: int) -> list[int]:
        """Train ``count`` steps on batches of two samples; return the numbers of the batches."""
        found = []
        for step in range(count):
            first, second = next(sampler), next(sampler)
            assert (second, first % 4) == (first + 1, 2 * ranks.rank())
            found.append(first // 4)
            steps(engine, step, 1)
        return found

    try:
        engine = start(3, hf_zero={"replicas": "torchft"})
        sampler = indices()
        assert numbers(engine, sampler, 3) == [0, 2, 4]  # group 1 was given 1, 3 and 5
        engine.save_checkpoint(folder, client_state={"mine": 5})
        assert numbers(engine, sampler, 1) == [6]
        engine.load_checkpoint(folder)  # a process that has read batches goes on with them, as in plain PyTorch
        assert numbers(engine, sampler, 1) == [8]
        engine.destroy()
        engine = start(3, hf_zero={"replicas": "torchft"})
        assert engine.load_checkpoint(folder)[1] == {"mine": 5} and engine.global_steps == 3
        assert numbers(engine, indices(), 2) == [6, 8]
        engine.destroy()
        alone = start(3)
        assert alone.load_checkpoint(folder)[1] == {"mine": 5}
    finally:
        module.Quorum = real  # type: ignore[misc]


def test_all_groups_started_again_from_a_checkpoint_go_on_with_the_next_batches(tmp_path: Path) -> None:
    ranks.run_ranks(_all_groups_started_again, 2, str(tmp_path))


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "`zero_optimization.offload_optimizer.device`"),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 2}}, "`zero_optimization.mics_shard_size`"),
        ({"sequence_parallel_size": 2}, "`sequence_parallel_size`"),
        ({"tensor_parallel": {"autotp_size": 2}}, "`tensor_parallel.autotp_size`"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}}, "`optimizer.type`"),
        ({"hf_zero": {"replicas": "torchft", "snapshot_steps": 3}}, "`hf_zero.snapshot_steps`"),
    ],
)
def test_what_is_not_served_is_refused_by_name(extra: dict[str, Any], named: str) -> None:
    config = {"train_batch_size": 8, "hf_zero": {"replicas": "TorchFT"}, **extra}
    with pytest.raises(UnsupportedError, match="replica groups are not provided together with") as refused:
        resolve(config, world_size=2)
    assert named in str(refused.value)


def test_missing_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_zero.replica_groups.quorum import exchange_timeout, group_number, number_of_groups

    for name in ("REPLICA_GROUP_ID", "TORCHFT_LIGHTHOUSE", "NUM_REPLICA_GROUPS", "TORCHFT_TIMEOUT_SEC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="REPLICA_GROUP_ID is ''"):
        group_number()
    monkeypatch.setenv("REPLICA_GROUP_ID", "1")
    with pytest.raises(ConfigError, match="TORCHFT_LIGHTHOUSE is not set"):
        group_number()
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:29510")
    assert group_number() == 1
    with pytest.raises(ConfigError, match="NUM_REPLICA_GROUPS is ''"):
        number_of_groups()
    assert exchange_timeout().total_seconds() == 60
    for wrong in ("soon", "0", "nan", "inf"):
        monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", wrong)
        with pytest.raises(ConfigError, match=f"TORCHFT_TIMEOUT_SEC is '{wrong}': set it to a number of seconds above 0"):
            exchange_timeout()


def test_groups_that_have_trained_apart_and_groups_that_begin_unlike() -> None:
    """Facts of a quorum: the first group with the newest state counts; different weights at the begin are an error."""
    quorum = object.__new__(Quorum)
    quorum.group = 1
    same = (Member(0, 4, 8, False, False), Member(1, 4, 8, False, False), Member(2, 0, 3, True, True))
    assert not quorum._fork(Formed(same, 4, None, ()), same[1])
    apart = (Member(2, 0, 3, True, True), Member(0, 4, 8, False, False), Member(1, 4, 9, False, False))
    assert quorum._fork(Formed(apart, 4, None, ()), apart[2])
    begin = (Member(0, 0, 8, False, True), Member(1, 0, 9, False, True))
    with pytest.raises(StateError, match="start from different weights"):
        quorum._fork(Formed(begin, 0, None, ()), begin[1])
    with pytest.raises(StateError, match="several replica groups have the number 1"):
        quorum._fork(Formed((same[1], same[1]), 4, None, ()), same[1])
