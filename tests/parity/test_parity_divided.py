"""Losses that compute with parameters, where tensor parallelism or experts divide them: a loss sees whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import observe
from hf_zero.errors import StateError, UnsupportedError
from tests.support import parity, ranks, zoo
from tests.support.experts import alike, build, mixed, with_experts, with_split_layers
from tests.support.logged import messages_of_log
from tests.support.models import Batch
from tests.support.parity import Run, check_training
from tests.support.versions import TRANSFORMERS_5

DENSE, EXPERTS = "Qwen3ForCausalLM", "MixtralForCausalLM"  # Qwen3's norms of heads are whole, and their gradients are sums over ranks
Penalty = Callable[[nn.Module], torch.Tensor]


def plain_module(model: Any) -> nn.Module:
    return getattr(model, "module", model)


def norms(model: nn.Module) -> torch.Tensor:
    """Return a penalty that is no sum over elements, by iteration."""
    return 0.02 * torch.stack([param.norm() for _, param in model.named_parameters()]).sum()


def means(model: nn.Module) -> torch.Tensor:
    """Return a penalty that divides by the number of elements."""
    return 0.1 * sum((param.square().sum() / param.numel() for param in model.parameters()), torch.zeros(()))


def by_name(model: Any) -> torch.Tensor:
    """Return penalties on matrices that are looked up by name; the output of a part of the model is in it, too."""
    layer = model.model.layers[0]
    weight = layer.self_attn.o_proj.weight
    own = (weight @ weight.T - torch.eye(len(weight))).square().mean() + model.lm_head.weight.abs().max()
    return 0.1 * (own + layer.mlp(torch.ones(1, 1, weight.shape[0])).square().mean())


class FromStart:
    """Penalty on the distance from the first values, which are kept as the script's loop finds them: parts after ``initialize``."""

    def __init__(self) -> None:
        self.start: dict[str, torch.Tensor] = {}

    def __call__(self, model: nn.Module) -> torch.Tensor:
        if not self.start:
            with torch.no_grad():
                self.start = {name: param.detach().clone() for name, param in model.named_parameters()}
        total = sum(((param - self.start[name]).square().sum() for name, param in model.named_parameters()), torch.zeros(()))
        return 0.1 * total.sqrt() if total > 0 else total


def check(name: str, run: Run, tp: int, penalties: list[Penalty | type[FromStart]]) -> None:
    for penalty in penalties:
        own: dict[int, Penalty] = {}  # one object for the engine's model and one for the reference's

        def loss(model: Any, batch: Batch, own: dict[int, Penalty] = own, penalty: Any = penalty) -> torch.Tensor:
            module = plain_module(model)
            compute = own.setdefault(id(module), FromStart() if penalty is FromStart else penalty)
            return zoo.loss(model, batch) + compute(module)

        check_training(lambda: build(name), alike(mixed(name), tp), loss, run, label=f"{penalty} {run}")


def over_tensor_parallel_ranks(stage: int) -> None:
    kept = [FromStart] if stage < 3 else []  # stage 3 refuses to copy values outside of `GatheredParameters`
    check(DENSE, with_split_layers(Run(stage, clip=0.5, accumulation=2), 2), 2, [norms, means, by_name, *kept])


def over_experts(stages: list[int]) -> None:
    for stage in stages:
        check(EXPERTS, with_experts(Run(stage, clip=0.5), 2), 1, [norms, means, *([FromStart] if stage < 3 else [])])


def over_both() -> None:
    check(EXPERTS, with_split_layers(with_experts(Run(2, clip=0.5), 2), 2), 2, [norms, means])


# Stage 0 is slow here: `test_penalties_on_experts` has it, and stage 2 tells the same of parts.
@pytest.mark.fast_rows("2-2", "4-3")
@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 2), (4, 3)])
def test_penalties_under_tensor_parallelism(world: int, stage: int) -> None:
    """On 4 ranks stage 3 shards each part over two ranks."""
    ranks.run_ranks(over_tensor_parallel_ranks, world, stage)


def test_penalties_on_experts() -> None:
    ranks.run_ranks(over_experts, 2, [0, 3])


def test_penalties_on_experts_beside_split_layers() -> None:
    ranks.run_ranks(over_both, 4)


def weighted(model: Any, batch: Batch) -> torch.Tensor:
    """Return two losses weighted by the norms of their gradients (GradNorm), and a penalty on such gradients."""
    output = model(**batch)
    layer = plain_module(model).model.layers[-1]
    params = [layer.mlp.down_proj.weight, layer.self_attn.q_norm.weight, layer.input_layernorm.weight, layer.mlp.up_proj.weight]
    with torch.no_grad():
        model(**batch)  # a forward without gradients in between, such as a reference's
    second = output.logits.float().logsumexp(-1).square().mean()
    sizes = [torch.autograd.grad(loss, params[0], retain_graph=True)[0].norm() for loss in (output.loss, second)]
    gradients = torch.autograd.grad(output.loss, params, create_graph=True)
    penalty = sum((gradient.norm() for gradient in gradients), torch.zeros(()))
    return output.loss + (sizes[0] / sizes[1]).detach() * second + 0.1 * penalty + norms(plain_module(model))


def _weighted(stages: list[int], **config: Any) -> None:
    def make() -> nn.Module:
        model = build(DENSE)
        model.set_attn_implementation("eager")  # type: ignore[operator]  # the fused one has no second derivative
        return model

    for stage in stages:
        check_training(make, alike(mixed(DENSE), 2), weighted, with_split_layers(Run(stage, **config), 2))


def test_gradients_with_respect_to_parts() -> None:
    ranks.run_ranks(_weighted, 2, [0, 1])


def without_the_head(model: Any, batch: Batch) -> torch.Tensor:
    """Return a loss from the output of the inner model, which is called by itself, and the weight of the head; and a penalty."""
    module = plain_module(model)
    hidden = module.model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).last_hidden_state[:, :-1]
    logits = hidden @ module.lm_head.weight.T
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()) + means(module)


def _without_the_head(stages: list[int]) -> None:
    for stage in stages:
        check_training(lambda: build(DENSE), alike(mixed(DENSE), 2), without_the_head, with_split_layers(Run(stage), 2))


def test_a_loss_of_the_inner_model_and_the_weight_of_the_head() -> None:
    ranks.run_ranks(_without_the_head, 2, [0, 2])


def gradient_of_experts() -> str:
    engine = parity.initialize(build(EXPERTS), with_experts(Run(1), 2))
    loss = engine(**mixed(EXPERTS)(0, 0, ranks.rank())).loss
    part = next(param for name, param in engine.module.named_parameters() if "experts" in name)
    with pytest.raises(UnsupportedError, match="parameter of experts that are divided"):
        torch.autograd.grad(loss, part, retain_graph=True)
    engine.backward(loss)
    engine.step()
    return type(part).__name__


def test_gradient_with_respect_to_a_part_of_the_experts_is_refused() -> None:
    assert "Divided" not in "".join(ranks.run_ranks(gradient_of_experts, 2))


def outside_of_a_loss(name: str, run: Run) -> tuple[list[str], list[str]]:
    """Return the errors of losses with a penalty from before the forward and one from after the backward, and what was logged."""
    observe._warned.clear()
    engine = parity.initialize(build(name), run)
    batch = mixed(name)(0, 0, 0 if "tensor_parallel" in run.extra else ranks.rank())
    param = next(param for key, param in engine.module.named_parameters() if key.endswith("mlp.up_proj.weight") or "experts" in key)
    ema = param.detach().clone()
    errors: list[str] = []
    with messages_of_log() as lines:
        if ranks.rank() == 0:
            param.norm().item()  # one rank alone may look
            with torch.no_grad():
                ema.lerp_(param, 0.5)
        penalty = 0.1 * param.norm()
        with pytest.raises(StateError) as caught:
            engine.backward(engine(**batch).loss + penalty)
        errors.append(str(caught.value))
        engine.zero_grad()
        engine.discard_gradients()
        engine.backward(engine(**batch).loss)
        with pytest.raises(StateError) as caught:
            (0.1 * param.square().sum()).backward()
        errors.append(str(caught.value))
        with pytest.raises(StateError) as caught:
            (param - ema).norm().backward()  # from values that the script has kept
        errors.append(str(caught.value))
    engine.destroy()
    return errors, [line for line in lines if "this rank's part" in line]


def replaced(name: str, run: Run) -> list[str]:
    """Return the errors of saves, of a forward and of a step after a part was replaced by a parameter of its shape."""
    engine = parity.initialize(build(name), run)
    batch = mixed(name)(0, 0, 0 if "tensor_parallel" in run.extra else ranks.rank())
    mlp = engine.module.model.layers[0].mlp
    owner, leaf = (mlp.experts, "down_proj") if hasattr(mlp, "experts") else (mlp.up_proj, "weight")
    loss = engine(**batch).loss
    engine.backward(loss)
    setattr(owner, leaf, nn.Parameter(getattr(owner, leaf).data.clone()))
    errors = []
    for attempt in (engine.step, lambda: engine(**batch), engine._consolidated_16bit_state_dict):
        with pytest.raises(UnsupportedError) as caught:
            attempt()
        errors.append(str(caught.value))
    engine.destroy()
    return errors


def test_a_part_that_is_replaced_after_initialize_is_an_error() -> None:
    stacked = [(EXPERTS, with_experts(Run(2), 2))] if TRANSFORMERS_5 else []  # transformers 4 has a list of modules
    for name, run in ((DENSE, with_split_layers(Run(0), 2)), *stacked):
        for errors in ranks.run_ranks(replaced, 2, name, run):
            assert all("a new parameter" in error and "model.layers.0.mlp" in error for error in errors)


def hooked() -> list[str]:
    """Return the warnings of a forward with hooks on a split layer, on a whole one and on the embedding, whose output is whole."""
    observe._warned.clear()
    engine = parity.initialize(build(DENSE), with_split_layers(Run(1), 2))
    layer = engine.module.model.layers[0]
    for module in (layer.mlp.up_proj, layer.input_layernorm, engine.module.get_input_embeddings()):
        module.register_forward_hook(lambda _module, _args, output: None)
    layer.self_attn.k_proj.weight.register_hook(lambda grad: grad / grad.norm())
    layer.input_layernorm.weight.register_hook(lambda grad: grad / grad.norm())
    with messages_of_log() as lines:
        for _ in range(2):
            engine.backward(engine(**mixed(DENSE)(0, 0, 0)).loss)
            engine.step()
    own = [line for line in lines if "its hook" in line]
    assert ranks.rank() or (len(own) == 1 and "k_proj.weight: its hook (register_hook" in own[0]), own
    return [line for line in lines if "see this rank's part" in line]


def test_hooks_on_split_layers_are_warned_of() -> None:
    first, second = ranks.run_ranks(hooked, 2)
    assert len(first) == 1 and "layers.0.mlp.up_proj is split over 2 ranks" in first[0] and not second


@pytest.mark.parametrize("stage", [0, 2])
def test_a_penalty_from_outside_of_the_loss_is_an_error_on_all_ranks(stage: int) -> None:
    for name, run in ((DENSE, with_split_layers(Run(stage), 2)), (EXPERTS, with_experts(Run(stage), 2))):
        first, second = ranks.run_ranks(outside_of_a_loss, 2, name, run)
        for errors, _ in (first, second):
            assert "a loss contains norm() of model.layers." in errors[0] and "a loss contains square() of model.layers." in errors[1]
            assert "a loss contains sub() of model.layers." in errors[2]
        assert len(first[1]) == 1 and first[1][0].startswith("norm() of model.layers.")
