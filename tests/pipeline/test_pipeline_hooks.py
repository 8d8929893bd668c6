"""Hooks that a script has on modules of a pipeline run on the stage of the module alone, around its forward and its backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.errors import StateError, UnsupportedError
from tests.pipeline.pipelines import with_stages
from tests.support import parity, ranks
from tests.support.parity import Run
from tests.support.tp_training import zoo_case

CASE = zoo_case("LlamaForCausalLM", {"num_hidden_layers": 2})


def halve_outputs(module: nn.Module) -> None:
    module.register_forward_hook(lambda _module, _args, output: output * 0.5)


def halve_arguments(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _module, args: (args[0] * 0.5, *args[1:]))


def halve_gradients_of_inputs(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda _module, inputs, _outputs: tuple(grad * 0.5 for grad in inputs))


def halve_gradients_of_outputs(module: nn.Module) -> None:
    def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: grad * 0.5)

    module.register_forward_hook(hook)


HOOKS = (halve_outputs, halve_arguments, halve_gradients_of_inputs, halve_gradients_of_outputs)


def one_step(put: Callable[[nn.Module], None], layer: int) -> None:
    batch = parity.prepare(CASE.rows(0, 0, 0), parity.DTYPES["fp32"])
    whole = CASE.build().train()
    put(whole.model.layers[layer])
    loss = CASE.forward(whole, batch)
    loss.backward()
    norm = float(torch.stack([param.grad.norm() for param in whole.parameters()]).norm())
    engine = parity.initialize(CASE.build(), with_stages(Run(1, clip=0.0), 2))
    put(engine.module.model.layers[layer])
    found = CASE.forward(engine, batch)
    engine.backward(found)
    engine.step()
    assert float(found) == pytest.approx(float(loss), rel=1e-5), (put, layer)
    assert parity.as_float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-4), (put, layer)
    engine.destroy()


def every_hook() -> None:
    for put in HOOKS:
        for layer in (0, 1):  # the tensor that crosses the border is the result of the first
            one_step(put, layer)


def test_hooks_on_layers_change_values_and_gradients_once() -> None:
    ranks.run_ranks(every_hook, 2, ordered=False)  # the stages have collectives of their own


def runs_by_stage() -> None:
    engine, seen = parity.initialize(CASE.build(), with_stages(Run(1), 2)), []
    for layer in engine.module.model.layers:
        layer.register_forward_hook(lambda module, _args, output: seen.append((module, bool(output.isnan().any()))))
    CASE.forward(engine, parity.prepare(CASE.rows(0, 0, 0), parity.DTYPES["fp32"]))
    assert {module for module, _ in seen} == {engine.module.model.layers[ranks.rank()]}
    assert not any(nan for _, nan in seen)
    engine.destroy()


def test_hooks_run_on_the_stage_of_their_module() -> None:
    ranks.run_ranks(runs_by_stage, 2, ordered=False)


def kept(layer: int) -> None:
    """A loss of one stage's tensors: the other rank would wait for gradients that never come."""
    engine, found = parity.initialize(CASE.build(), with_stages(Run(1), 2)), []
    engine.module.model.layers[layer].register_forward_hook(lambda _module, _args, output: found.append(output))
    loss = CASE.forward(engine, parity.prepare(CASE.rows(0, 0, 0), parity.DTYPES["fp32"]))
    for output in found:
        loss = loss + output.square().mean()
    with pytest.raises(UnsupportedError, match=rf"loss of stage rank\(s\) {layer} uses tensors that a hook or an attribute has kept"):
        engine.backward(loss)
    engine.destroy()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_loss_of_kept_tensors_is_an_error_on_all_ranks(layer: int) -> None:
    ranks.run_ranks(kept, 2, layer, ordered=False)


def refused() -> None:
    engine = parity.initialize(CASE.build(), with_stages(Run(1), 2))
    batch = parity.prepare(CASE.rows(0, 0, 0), parity.DTYPES["fp32"])
    with pytest.raises(StateError, match=r"Embedding was called alone.* only one stage of the pipeline has it"):
        engine.module.get_input_embeddings()(batch["input_ids"])  # the first rank has it
    with pytest.raises(StateError, match="was copied while pipeline.stages divides it"):
        copy.deepcopy(engine.module)
    engine.backward(CASE.forward(engine, batch))
    weight = engine.module.model.layers[1].mlp.up_proj.weight  # the second rank's
    engine.optimizer.state[weight] = {}
    with pytest.raises(StateError, match=r"optimizer.state was used with model.layers.1.mlp.up_proj.weight"):
        engine.step()
    engine.destroy()


def test_what_one_stage_alone_has_is_refused_on_all_ranks() -> None:
    ranks.run_ranks(refused, 2, ordered=False)
