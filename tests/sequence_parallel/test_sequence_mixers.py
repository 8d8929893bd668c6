"""Models whose tokens meet outside of the attention interface train over slices as over whole sequences; what cannot is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.errors import HfZeroError, StateError, UnsupportedError
from hf_zero.integrations.ulysses import UlyssesSPAttentionHF, attention_replaced
from hf_zero.sequence_parallel import sequence_functions
from hf_zero.sequence_parallel.joining import cut as cut_here
from hf_zero.sequence_parallel.joining import join
from hf_zero.sequence_parallel.sequence_functions import RECURRENCES, convolve, recur
from hf_zero.sequence_parallel.token_flow import TokenFlow, find_token_flow
from tests.support import ranks, zoo
from tests.support.parity import Run
from tests.support.sequences import Data, check, cut, loss_over_slices
from tests.tensor_parallel.breadth import perturb

pytest.importorskip("transformers", minversion="5.20")


def model_of(name: str, recompute: str = "", **changes: Any) -> nn.Module:
    model: Any = zoo.build(name, changes={"use_cache": False, **changes})
    perturb(model)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": recompute == "reentrant"})
    return model  # type: ignore[no-any-return]


def small(make: Callable[[], nn.Module]) -> nn.Module:
    """The model with the weights that ``build`` makes larger as they were: recurrences overflow."""
    model = make()
    for param in model.parameters():
        if param.dim() > 1:
            param.data.div_(5)
    return model


TRAINED: dict[str, tuple[Callable[[], nn.Module], Run, Data, int]] = {
    "delta rule": (partial(model_of, "Qwen3NextForCausalLM"), Run(stage=3, clip=0.5), Data(padding="left"), 2),
    "delta rule, fewer heads than ranks": (partial(model_of, "Qwen3_5ForCausalLM"), Run(stage=0), Data(), 4),
    "delta rule recomputed": (partial(model_of, "Qwen3NextForCausalLM", "reentrant"), Run(stage=3, accumulation=2), Data(), 2),
    "state space with heads": (partial(model_of, "NemotronHForCausalLM"), Run(stage=3), Data(padding="left"), 4),
    "state space with heads, two groups": (partial(model_of, "BambaForCausalLM", "again"), Run(stage=0, accumulation=2), Data(), 2),
    "state space without heads": (partial(model_of, "MambaForCausalLM"), Run(stage=3), Data(padding="left"), 2),
    "short convolutions": (partial(model_of, "Lfm2MoeForCausalLM"), Run(stage=3, clip=0.5), Data(padding="right"), 4),
    "attention of its own": (partial(model_of, "GPTJForCausalLM"), Run(stage=3), Data(packed=True), 2),
    "slopes": (partial(model_of, "BloomForCausalLM"), Run(stage=3, accumulation=2), Data(padding="left"), 2),
}


class Unnumbered(Data):
    """Batches without positions."""

    def batch(self, *seed: int) -> dict[str, Any]:
        return {name: value for name, value in super().batch(*seed).items() if name != "position_ids"}


def trained(label: str) -> None:
    make, run, data, size = TRAINED[label]
    check(partial(small, make), run, data if data.packed else Unnumbered(**vars(data)), size)


@pytest.mark.fast_rows("delta rule", "state space with heads", "slopes")
@pytest.mark.parametrize("label", TRAINED)
def test_training_is_that_of_whole_sequences(label: str) -> None:
    ranks.run_ranks(trained, TRAINED[label][3], label)


# ------------------------------------------------------------------------------------------------------------- functions


def scan(hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: Any = None) -> torch.Tensor:
    """A recurrence by its definition: heads (batch, tokens, heads, width), groups of heads (batch, tokens, groups, states)."""
    times = hidden_states.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(times, 2), C.repeat_interleave(times, 2)
    state = torch.zeros(*hidden_states.shape[::2], hidden_states.shape[3], B.shape[3], dtype=hidden_states.dtype)
    outputs = []
    for place in range(hidden_states.shape[1]):
        state = state * torch.exp(A * dt[:, place])[..., None, None] + hidden_states[:, place, :, :, None] * B[:, place, :, None]
        outputs.append((state * C[:, place, :, None]).sum(-1) + D[:, None] * hidden_states[:, place])
    return torch.stack(outputs, 1)


def recurrence(groups: int) -> None:
    from hf_zero.comm.back_end import build_collectives
    from hf_zero.comm.topology import build_topology

    network = build_collectives(build_topology())
    generator = torch.Generator().manual_seed(3)
    length, heads = 4 * network.world, 4
    shapes = {"hidden_states": (2, length, heads, 3), "dt": (2, length, heads), "B": (2, length, groups, 5), "C": (2, length, groups, 5)}
    whole = {name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for name, shape in shapes.items()}
    own = {name: torch.rand(heads, generator=generator, dtype=torch.float64).neg().requires_grad_() for name in ("A", "D")}
    weight = torch.randn(2, length, heads, 3, generator=generator, dtype=torch.float64)
    expected = scan(**whole, **own)
    (expected * weight).sum().backward()
    mine = {name: cut_here(network, tensor.detach(), 1).clone().requires_grad_() for name, tensor in whole.items()}
    params = {name: tensor.detach().clone().requires_grad_() for name, tensor in own.items()}
    given = {**mine, **params}
    found = recur(RECURRENCES["mamba2_chunk_scan"], network, scan, (given.pop("hidden_states"),), given)
    torch.testing.assert_close(found, cut_here(network, expected, 1))
    (found * cut_here(network, weight, 1)).sum().backward()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor.grad, cut_here(network, whole[name].grad, 1))  # type: ignore[arg-type]
    for name, tensor in params.items():
        assert tensor.grad is not None
        torch.distributed.all_reduce(tensor.grad)
        torch.testing.assert_close(tensor.grad, own[name].grad)


@pytest.mark.parametrize(("world", "groups"), [(2, 1), (2, 2), (2, 4), (4, 2), (4, 1)])
def test_a_recurrence_over_slices(world: int, groups: int) -> None:
    ranks.run_ranks(recurrence, world, groups)


def causal(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(hidden_states, (weight.shape[1] - 1, 0))
    return torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=len(weight)).tanh()


def convolution(length: int, width: int) -> None:
    from hf_zero.comm.back_end import build_collectives
    from hf_zero.comm.topology import build_topology

    network = build_collectives(build_topology())
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(2, 6, length * network.world, generator=generator, dtype=torch.float64).requires_grad_()
    own = [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in ((6, width), (6,))]
    expected = causal(whole, *own)
    expected.square().sum().backward()
    mine = cut_here(network, whole.detach(), 2).clone().requires_grad_()
    params = [param.detach().clone().requires_grad_() for param in own]
    found = convolve(network, causal, (mine, *params), {})
    torch.testing.assert_close(found, cut_here(network, expected, 2))
    found.square().sum().backward()
    torch.testing.assert_close(mine.grad, cut_here(network, whole.grad, 2))  # type: ignore[arg-type]
    for param, theirs in zip(params, own, strict=True):
        assert param.grad is not None
        torch.distributed.all_reduce(param.grad)
        torch.testing.assert_close(param.grad, theirs.grad)


@pytest.mark.parametrize(("world", "length", "width"), [(2, 5, 4), (4, 3, 4), (4, 2, 4), (2, 5, 1)])
def test_a_convolution_over_slices(world: int, length: int, width: int) -> None:
    ranks.run_ranks(convolution, world, length, width)


def joined() -> None:
    """Numbers, truth values and complex numbers; what was cut here comes back without a message."""
    from hf_zero.comm.back_end import build_collectives
    from hf_zero.comm.topology import build_topology

    network = build_collectives(build_topology())
    numbers = torch.arange(12).view(2, 6)
    for whole in (numbers, numbers % 3 == 0, torch.complex(numbers.float(), numbers.float() + 1)):
        mine = cut_here(network, whole, 1)
        sent = network.sent_bytes
        assert join(network, mine, 1) is whole and network.sent_bytes == sent
        assert torch.equal(join(network, mine.clone(), 1), whole)


def test_joining_is_the_opposite_of_cutting() -> None:
    ranks.run_ranks(joined, 2)


# ---------------------------------------------------------------------------------------------------------------- flow


def flow_of(name: str, size: int = 2) -> TokenFlow:
    return find_token_flow(zoo.build(name), size, partial(attention_replaced, "sdpa"))


def test_where_tokens_meet() -> None:
    found = flow_of("Qwen3NextForCausalLM")
    assert (found.functions, found.heads, found.mixers) == (["model.layers.0.linear_attn"], ["model.layers.1.self_attn"], {})
    shifted = flow_of("RwkvForCausalLM")
    assert {path.rpartition(".")[2] for path in shifted.mixers} == {"attention", "feed_forward"}
    experts = flow_of("NemotronHForCausalLM")
    assert experts.functions == ["model.layers.0.mixer"] and experts.mixers == {}  # not the experts
    assert flow_of("MusicgenForCausalLM").items.keys() == {"model.decoder.layers.0", "model.decoder.layers.1"}  # no embeddings, no heads


def test_heads_that_ranks_do_not_divide_get_whole_sequences() -> None:
    found = flow_of("Qwen3NextForCausalLM", 8)
    assert found.functions == [] and "8 ranks do not divide its 2 heads" in found.reasons["model.layers.0.linear_attn"]
    assert found.heads == [] and "8 ranks do not divide its 4 heads" in found.reasons["model.layers.1.self_attn"]


def test_the_functions_of_transformers_are_their_own_again() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as library

    before = dict(vars(library))
    flow_of("Qwen3NextForCausalLM")
    assert all(vars(library)[name] is value for name, value in before.items())
    assert not sequence_functions._under_way


# ------------------------------------------------------------------------------------------------------------- refusals


def refusals() -> list[str]:
    found = []
    for name in ("CpmAntForCausalLM", "ProphetNetForCausalLM"):
        with pytest.raises(UnsupportedError) as caught:
            UlyssesSPAttentionHF.register_with_transformers(zoo.build(name), None, 2, 2)
        found.append(str(caught.value))
    batches: list[tuple[str, Data, type[HfZeroError]]] = [
        ("BloomForCausalLM", Data(packed=True), StateError),
        ("BartForCausalLM", Data(), StateError),
    ]
    for name, data, kind in batches:
        model = zoo.build(name)
        state = UlyssesSPAttentionHF.register_with_transformers(model, None, 2, 2)
        assert state is not None
        with pytest.raises(kind) as caught_there:
            loss_over_slices(model, cut(data.batch(0), ranks.rank(), 2), state.get_sequence_parallel_group())
        found.append(str(caught_there.value))
    return found


def test_what_slices_would_make_wrong_is_refused_by_name() -> None:
    texts = [
        "does not keep one hidden state per token",
        "does not keep one hidden state per token",
        "BloomForCausalLM takes no position_ids, and those of this batch are not 0, 1, 2",
        "BartForCausalLM computes its loss from whole sequences (it has a loss of its own)",
    ]
    found = ranks.run_ranks(refusals, 2)
    assert found[0] == found[1]
    assert [text for text, message in zip(texts, found[0], strict=True) if text not in message] == []


def evaluation() -> None:
    """Whole sequences in evaluation with ``disable_in_eval``, as ever; and training goes on."""
    model, other = model_of("NemotronHForCausalLM"), model_of("NemotronHForCausalLM")
    state = UlyssesSPAttentionHF.register_with_transformers(model, None, 2, 2, disable_in_eval=True)
    assert state is not None
    batch = Data(length=16).batch(0)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**batch).logits, other.eval()(**batch).logits)
        generated = model.generate(input_ids=batch["input_ids"], max_new_tokens=3, do_sample=False)  # type: ignore[operator]
        assert torch.equal(generated, other.generate(input_ids=batch["input_ids"], max_new_tokens=3, do_sample=False))  # type: ignore[operator]
    loss = loss_over_slices(model.train(), cut(batch, ranks.rank(), 2), state.get_sequence_parallel_group())
    assert float(loss.detach()) == pytest.approx(float(other.train()(**batch).loss.detach()), rel=1e-5)


def test_evaluation_and_generation_on_whole_sequences() -> None:
    ranks.run_ranks(evaluation, 2)
