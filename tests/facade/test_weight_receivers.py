"""Weights of a model in training to a server in another process, as examples/rl sends them: there bit for bit after each step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.utils import iter_full_params
from tests.facade import streams
from tests.support import examples, ranks, weight_server

STEPS = 2


def _masters(engine: Any) -> dict[str, torch.Tensor]:
    return {name: hf_zero.utils.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}


def _merged(engine: Any) -> dict[str, torch.Tensor]:
    """What peft makes of the adapters in a plain copy of the model."""
    with hf_zero.zero.GatheredParameters(list(engine.module.parameters())):
        plain = copy.deepcopy(engine.module)
    return {name: param.detach() for name, param in plain.merge_and_unload().named_parameters()}


def _sends(way: str, url: str) -> None:
    with examples.modules("rl", "senders") as found:
        send = found.senders.SENDERS[way](url, bucket_bytes=4096) if ranks.rank() == 0 else list
        for stage, adapted in ((0, False), (1, False), (2, False), (3, False), (0, True), (3, True)):
            engine = streams.engine_of(streams.lora(streams.llama()) if adapted else streams.llama(), stage)
            for _ in range(STEPS):
                streams.train(engine)
                expected = _merged(engine) if adapted else _masters(engine)
                send(iter_full_params(engine, bucket_bytes=4096, rank0_only=True))
                if ranks.rank() == 0:
                    weight_server.assert_has(url, expected)
                torch.distributed.barrier()
            engine.destroy()


def test_a_server_takes_weights_over_a_group_of_its_own() -> None:
    with weight_server.serving(streams.llama()) as url:
        ranks.run_ranks(_sends, 2, "gloo", url)


@pytest.mark.slow  # fast: `test_a_server_takes_weights_over_a_group_of_its_own`
def test_a_server_takes_weights_from_requests() -> None:
    with weight_server.serving(streams.llama()) as url:
        ranks.run_ranks(_sends, 2, "http", url)
