"""Test ``generate()`` at stage 3: the plain model's tokens, ranks that stop at different lengths, gathered once or block by block."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import observe
from hf_zero.core.generation import GenerateMethod
from tests.support import ranks
from tests.support.models import CASES, LENGTH, VOCAB
from tests.support.parity import Run, initialize

NEW_TOKENS = 7


@pytest.mark.parametrize(
    ("gather", "names"),
    [
        (True, ("llama", "bart")),
        (False, ("gpt2", "t5", "mixtral")),
        pytest.param(True, ("gpt2", "t5", "mixtral"), marks=pytest.mark.slow),
        pytest.param(False, ("llama", "bart"), marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_plain_model(gather: bool, names: tuple[str, ...]) -> None:
    """Greedy and beams; decoder-only, encoder-decoder, experts; ranks stop at different lengths; the engine trains afterwards."""
    ranks.run_ranks(check_tokens, 2, gather, names)


def test_work_of_a_rank_that_finished() -> None:
    """Gathered: one call's gathers are the only collectives. Block by block: a finished rank takes part in the gathers and computes
    nothing.
    """
    ranks.run_ranks(check_work, 2)


@pytest.mark.slow
def test_three_ranks() -> None:
    ranks.run_ranks(check_tokens, 3, False, ("gpt2", "bart"))


@pytest.mark.slow  # fast: `test_tokens_are_those_of_the_plain_model`
def test_adapters_and_inner_models() -> None:
    """Check a PEFT wrapper and a module that contains a model: the inner ``generate`` runs."""
    ranks.run_ranks(check_inner, 2)


def test_the_choice() -> None:
    """Check that auto gathers a model that fits on every rank, logs this once, and gathers block by block if it does not fit on one."""
    ranks.run_ranks(check_choice, 2)


def test_method_is_the_module_s_own_again() -> None:
    ranks.run_ranks(check_removal, 2)


# ------------------------------------------------------------------------------------------------ jobs of the ranks


def run(gather: bool | str) -> Run:
    return Run(stage=3, extra={"hf_zero": {"gather_for_generation": gather}})


def prompt(rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(5 + (ranks.rank() if rank is None else rank))
    return torch.randint(3, VOCAB, (2, LENGTH), generator=generator)


def lengths(rank: int | None = None) -> dict[str, Any]:
    """Return lengths at which every rank stops elsewhere."""
    new = NEW_TOKENS - 3 * (ranks.rank() if rank is None else rank)
    return {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}


def check_tokens(gather: bool, names: tuple[str, ...]) -> None:
    for name in names:
        plain = CASES[name].build().eval()
        engine = initialize(CASES[name].build(), run(gather))
        engine.eval()
        for beams in (1, 3):
            expected = plain.generate(prompt(), num_beams=beams, **lengths())
            for _ in range(2):  # the first call learns the order of the blocks
                found = engine.generate(prompt(), num_beams=beams, **lengths())
                assert torch.equal(found, expected), f"{name}, {beams} beams"
        # transformers asks for this at stage 3; it is not needed, and must not hang
        assert torch.equal(engine.module.generate(prompt(), synced_gpus=True, **lengths()), plain.generate(prompt(), **lengths()))
        assert not any(unit.state.value == "gathered" for unit in engine.units)
        engine.train()
        batch = CASES[name].rows(0, 0, ranks.rank())
        loss = engine(**batch).loss
        torch.testing.assert_close(loss, plain.train()(**batch).loss)
        engine.backward(loss)
        engine.step()
        engine.destroy()


def check_work() -> None:
    forwards, gathers = count(False)
    mine = lengths()["max_new_tokens"]
    longest = lengths(0)["max_new_tokens"]
    assert forwards == mine
    assert gathers == longest, f"{gathers} gathers of a block, {longest} forwards of the slowest rank"
    forwards, gathers = count(True)
    assert forwards == mine and gathers == 1


def count(gather: bool) -> tuple[int, int]:
    """Return the number of forwards of the model on this rank, and of gathers of its first block, in one ``generate``."""
    engine = initialize(CASES["llama"].build(), run(gather))
    engine.eval()
    engine.generate(prompt(), **lengths())
    calls: list[int] = []
    handle = engine.module.register_forward_pre_hook(lambda *_: calls.append(1))
    with observe.record_labels() as labels:
        engine.generate(prompt(), **lengths())
    handle.remove()
    engine.destroy()
    return len(calls), sum(label == "hf_zero::gathering (model.layers.0)" for label in labels)


class Holder(nn.Module):
    """A user's module around a model, as in Lightning."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)


def check_inner() -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        return get_peft_model(
            CASES["llama"].build(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)
        )

    plain = adapted().eval()
    expected = plain.generate(input_ids=prompt(), **lengths())
    for gather in (True, False):
        builders: list[Callable[[], nn.Module]] = [adapted, lambda: Holder(adapted())]
        for build in builders:
            engine = initialize(build(), run(gather))
            engine.eval()
            model = getattr(engine.module, "model", engine.module) if isinstance(engine.module, Holder) else engine.module
            for _ in range(2):
                assert torch.equal(model.generate(input_ids=prompt(), **lengths()), expected)
            engine.destroy()


def check_choice() -> None:
    from hf_zero.core import generation

    engine = initialize(CASES["llama"].build(), run("auto"))
    engine.eval()
    chosen = engine.runtime.module.__dict__["generate"]._generation
    said: list[str] = []
    generation.log_rank0, before = lambda text, *values: said.append(text % values), generation.log_rank0
    free = generation.free_bytes
    try:
        for _ in range(2):
            engine.generate(prompt(), **lengths())
        assert chosen._decide() and len(said) == 1 and "gathers the whole model once" in said[0]
        if ranks.rank() == 1:
            generation.free_bytes = lambda *_: 1000
        assert not chosen._decide() and "block by block" in said[1]
        expected = CASES["llama"].build().eval().generate(prompt(), **lengths())
        assert torch.equal(engine.generate(prompt(), **lengths()), expected)
    finally:
        generation.log_rank0, generation.free_bytes = before, free
    engine.destroy()


def check_removal() -> None:
    engine = initialize(CASES["llama"].build(), run("auto"))
    copied = copy.deepcopy(engine.module)
    assert copied.generate.__self__ is copied and "generate" in vars(engine.module)
    engine.module.generate = prompt  # a script's own
    engine = initialize(engine.module, Run(stage=2))
    assert type(vars(engine.module)["generate"]) is GenerateMethod
    module = engine.module
    engine.destroy()
    assert vars(module)["generate"] is prompt


def test_free_memory_of_the_host_is_shared() -> None:
    from hf_zero.comm.nodes import free_bytes

    alone = free_bytes(torch.device("cpu"))
    assert alone is not None and 0 < alone < 1 << 50
    assert free_bytes(torch.device("cpu"), 4) < alone / 2
    assert free_bytes(torch.device("meta")) is None
