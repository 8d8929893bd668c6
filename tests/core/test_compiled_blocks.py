"""Test torch.compile of blocks: no graph break inside a block, one graph for all equal blocks, no recompilation, the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_zero.core.engine import Engine
from tests.support import ranks
from tests.support.parity import Run, initialize

WAYS = ("engine.compile", "before", "regions", "parts", "complete module")


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes))


def _compile(way: str, target: nn.Module | Engine, backend: Callable[..., object]) -> None:
    if way == "engine.compile":
        assert isinstance(target, Engine)
        target.compile(backend=backend)  # type: ignore[arg-type]
        return
    model = target.module if isinstance(target, Engine) else target
    if way == "regions":  # as accelerate's regional compilation does it: blocks, and what stands around them
        from accelerate.utils.other import compile_regions_deepspeed

        compile_regions_deepspeed(model, backend=backend)
        return
    targets: Iterable[nn.Module] = model.model.layers
    if way == "parts":
        targets = [layer.mlp for layer in model.model.layers]
    elif way == "complete module":
        targets = [model]
    for module in targets:
        module.compile(backend=backend)


def _train(stage: int, way: str, checkpointing: str, folder: str) -> tuple[list[float], list[tuple[int, int]]]:
    """Train four steps, with an evaluation, a shorter batch and a save between; return losses, and (graphs, breaks) after each step."""
    import torch._dynamo.testing
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    backend = torch._dynamo.testing.CompileCounterWithBackend("eager")
    model = _llama()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    if way in ("before", "parts"):
        _compile(way, model, backend)
    engine = initialize(model, Run(stage=stage))
    if way and way not in ("before", "parts"):
        _compile(way, engine, backend)
    losses, counts = [], []
    for step in range(6):
        torch.manual_seed(step)
        tokens = torch.randint(0, 64, (1 if step == 2 else 2, 8))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        if step in (1, 4):
            engine.eval()
            with torch.no_grad():
                losses.append(float(engine(input_ids=tokens, labels=tokens).loss))
            # Uncompiled: a cache would make every layer another graph.
            losses.append(engine.generate(tokens[:1], max_new_tokens=3, do_sample=False, pad_token_id=0, use_cache=True).sum().item())
            engine.train()
        if step == 3:
            engine.save_checkpoint(folder)
        counts.append((backend.frame_count, sum(counters["graph_break"].values())))
    engine.destroy()
    return losses, counts


def _both(stage: int, way: str, checkpointing: str, folder: str) -> tuple[list[float], list[float], list[tuple[int, int]]]:
    plain, _ = _train(stage, "", checkpointing, folder)
    compiled, counts = _train(stage, way, checkpointing, folder)
    return plain, compiled, counts


@pytest.mark.fast_rows("1-parts", "3-engine.compile")
@pytest.mark.parametrize("way", ["engine.compile", "before", "regions", "parts"])
@pytest.mark.parametrize("stage", [1, 3])
def test_no_break_and_no_graph_after_the_second_step(stage: int, way: str, tmp_path: Path) -> None:
    plain, compiled, counts = ranks.run_ranks(_both, 2, stage, way, "", str(tmp_path), timeout=300)[0]
    assert compiled == plain
    assert [breaks for _, breaks in counts] == [0] * len(counts)
    # Training, evaluation, and one more for another number of rows; three kinds of modules are compiled outside of the blocks by "regions".
    kinds = 4 if way == "regions" else 1
    graphs = [made for made, _ in counts]
    assert graphs[0] <= kinds
    assert graphs[-1] == graphs[2] <= 3 * kinds, graphs


@pytest.mark.slow  # fast: `test_no_break_and_no_graph_after_the_second_step`
@pytest.mark.fast_rows("not reentrant")
@pytest.mark.parametrize("checkpointing", ["reentrant", "not reentrant"])
def test_recomputed_blocks(checkpointing: str, tmp_path: Path) -> None:
    plain, compiled, counts = ranks.run_ranks(_both, 2, 3, "engine.compile", checkpointing, str(tmp_path), timeout=300)[0]
    assert compiled == plain
    assert [breaks for _, breaks in counts] == [0] * len(counts)
    assert counts[-1] == counts[2]


@pytest.mark.slow  # compiled blocks are what `engine.compile` makes
def test_complete_module(tmp_path: Path) -> None:
    """Check the graph breaks: hooks of blocks stay between graphs, hooks of their parts are compiled, so each block has two breaks."""
    plain, compiled, counts = ranks.run_ranks(_both, 2, 3, "complete module", "", str(tmp_path), timeout=300)[0]
    assert compiled == pytest.approx(plain, rel=1e-6)
    assert counts[0][1] <= 2 * 3
    assert counts[-1] == counts[2]


def _part_alone() -> tuple[torch.Tensor, torch.Tensor]:
    """Call a part of a compiled block by itself, in a loss."""
    torch._dynamo.reset()
    found = []
    for compiles in (False, True):
        engine = initialize(_llama(), Run(stage=3))
        if compiles:
            engine.compile(backend="eager")
        tokens = torch.arange(8).reshape(1, 8)
        for _ in range(2):
            hidden = engine(input_ids=tokens, output_hidden_states=True).hidden_states[-1]
            loss = hidden.sum() + engine.module.model.layers[1].mlp(hidden).square().mean()
            engine.backward(loss)
            engine.step()
        found.append(loss.detach())
        engine.destroy()
    return found[0], found[1]


@pytest.mark.slow  # fast: `test_no_break_and_no_graph_after_the_second_step` of parts
def test_a_part_of_a_compiled_block_that_is_called_by_itself() -> None:
    plain, compiled = ranks.run_ranks(_part_alone, 2, timeout=300)[0]
    assert torch.equal(plain, compiled)
