"""What goes over the borders of a pipeline is found in the model's own code: nothing is missing, and what cannot go is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_zero.errors import UnsupportedError
from hf_zero.pipeline.partition import make_plan, replan
from hf_zero.pipeline.plan import PipelinePlan
from hf_zero.tensor_parallel.skeleton import skeleton
from tests.pipeline import stages
from tests.support.rows import each

WIDTH, BLOCKS = 4, 4


class Result(dict[str, Any]):
    """What a model returns."""

    @property
    def loss(self) -> Tensor:
        loss: Tensor = self["loss"]
        return loss


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Embedding, blocks, head; what runs between the blocks is ``glue``."""

    def __init__(self, glue: Callable[..., Tensor], block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(BLOCKS))
        self.scale = nn.Parameter(torch.ones(WIDTH) * 1.5)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, 8)
        self.glue = glue

    def forward(self, ids: Tensor, labels: Tensor | None = None, scaled: bool = False) -> Result:
        x = self.glue(self, self.embed(ids), ids)
        if scaled:
            x = x * self.scale
        logits = self.head(x)
        return Result(logits=logits, loss=F.cross_entropy(logits.flatten(0, 1), (ids if labels is None else labels).flatten()))


def call() -> dict[str, Tensor]:
    return {"ids": torch.arange(12).reshape(3, 4) % 8}


def build(glue: Callable[..., Tensor], block: type[nn.Module] = Block) -> Net:
    torch.manual_seed(0)
    return Net(glue, block)


class Lists(nn.Module):
    """Lists of lists, none of which can be called."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))

    def forward(self, ids: Tensor) -> Result:
        x = ids[..., None].expand(*ids.shape, WIDTH).float()
        for layer in (layer for row in self.rows for layer in row):
            x = layer(x)
        return Result(loss=x.square().mean())


def plan_of(model: nn.Module, count: int = BLOCKS) -> PipelinePlan:
    return make_plan(model, count, "uniform", call())


def check_exact(model: nn.Module, plan: PipelinePlan) -> None:
    expected = stages.run_plain(model, call())
    model.zero_grad()
    found = stages.run_stages(model, plan, call())
    assert torch.equal(found.loss, expected.loss)
    for name, grad in expected.grads.items():
        other = found.grads[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            assert torch.allclose(other, grad, rtol=1e-5, atol=1e-7), name


def crossing_names(plan: PipelinePlan) -> list[list[str]]:
    return [[f"{plan.calls[crossing.call].path}[{crossing.leaf}]" for crossing in border] for border in plan.crossings]


# -- glue that goes over borders --------------------------------------------------------------------------------------


def straight(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def skip_to_the_end(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    return straight(model, x, ids) * x.sigmoid()


def mask_of_inputs(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x) * (ids > 2)[..., None]
    return x


def parameter_between(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    for place, layer in enumerate(model.layers):
        x = layer(x * model.scale if place in (1, 3) else x)
    return x


def tied_table(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    return F.linear(F.linear(straight(model, x, ids), model.embed.weight), model.embed.weight.t())


def one_layer_over_and_over(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    for _ in model.layers:
        x = model.layers[0](x)
    return model.layers[1](x)


def decision_on_a_value(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    for layer in model.layers:
        y = layer(x)
        x = y * 2 if float(x.sum()) > 1e9 else y
    return x


def in_place_on_its_own(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x) * 2
        x += 1
    return x


def changed_in_place(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    first = x = model.layers[0](x)
    x = model.layers[1](x)
    x += first
    return model.layers[3](model.layers[2](x)) + first


def changed_and_used_in_one_stage(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    x = model.layers[0](x) * 1
    x[:, 0] = 0
    return straight(model, x, ids)


GLUES: dict[Callable[..., Tensor], list[list[str]]] = {
    straight: [["layers.0[0]"], ["layers.1[0]"], ["layers.2[0]"]],
    skip_to_the_end: [["embed[0]", "layers.0[0]"], ["embed[0]", "layers.1[0]"], ["embed[0]", "layers.2[0]"]],
    mask_of_inputs: [["layers.0[0]"], ["layers.1[0]"], ["layers.2[0]"]],
    parameter_between: [["layers.0[0]"], ["layers.1[0]"], ["layers.2[0]"]],
    tied_table: [["layers.0[0]"], ["layers.1[0]"], ["layers.2[0]"]],
    changed_in_place: [["layers.0[0]"], ["layers.0[0]", "layers.1[0]"], ["layers.0[0]", "layers.2[0]"]],
    in_place_on_its_own: [["layers.0[0]"], ["layers.1[0]"], ["layers.2[0]"]],
    # What an ``if`` reads is needed wherever it stands, by every later stage.
    decision_on_a_value: [
        ["embed[0]", "layers.0[0]"],
        ["embed[0]", "layers.0[0]", "layers.1[0]"],
        ["embed[0]", "layers.0[0]", "layers.1[0]", "layers.2[0]"],
    ],
}


def test_exactly_what_later_stages_need_goes_over_a_border() -> None:
    def check(row: tuple[Callable[..., Tensor], list[list[str]]]) -> None:
        model = build(row[0])
        model.drop.p = 0.0
        plan = plan_of(model)
        assert crossing_names(plan) == row[1]
        check_exact(model, plan)

    each(GLUES.items(), check)


def test_parameters_are_held_where_they_are_read() -> None:
    assert plan_of(build(straight)).holders["scale"] == (0,)  # nothing reads it: with its neighbour
    assert plan_of(build(parameter_between)).holders["scale"] == (1, 3)
    assert plan_of(build(tied_table)).holders["embed.weight"] == (0, 3)
    plan = plan_of(build(one_layer_over_and_over), 3)
    assert plan.holders["layers.0.linear.weight"] == (0, 1, 2)
    assert [call.nth for call in plan.calls if call.path == "layers.0"] == [0, 1, 2, 3]
    check_exact(build(one_layer_over_and_over), plan)
    check_exact(build(changed_and_used_in_one_stage), plan_of(build(changed_and_used_in_one_stage), 3))


class Passing(Block):
    """Makes a bias, or hands on the one that it got."""

    def forward(self, x: Tensor, bias: Any = None) -> Any:
        made = bias if bias is not None else self.linear(x.mean(0, keepdim=True))
        return {"x": x + torch.tanh(self.linear(x)) * made, "more": [made, torch.zeros(1)]}


def hand_on(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    bias = None
    for layer in model.layers:
        found = layer(x, bias)
        x, bias = found["x"], found["more"][0]
    return x


def test_blocks_in_lists_of_lists_are_found() -> None:
    model = Lists()
    plan = plan_of(model)
    assert [call.path for call in plan.calls] == ["rows.0.0", "rows.0.1", "rows.1.0", "rows.1.1"]
    check_exact(model, plan)


def test_what_blocks_hand_on_goes_with_the_last_that_did() -> None:
    model = build(hand_on, Passing)
    plan = plan_of(model)
    assert crossing_names(plan) == [[f"layers.{place}[0]", f"layers.{place}[1]"] for place in range(3)]
    check_exact(model, plan)


# -- what cannot go over a border --------------------------------------------------------------------------------------


class Keeping(Block):
    """Keeps what it computes where a later block finds it, as a cache does."""

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        kept, reads, keeps = more if more else ({}, False, False)
        y = torch.tanh(self.linear(x))
        if keeps:
            kept["y"] = y * 2
        return x + y + (kept.get("y", 0) if reads else 0)


def cache(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    kept: dict[str, Tensor] = {}
    for place, layer in enumerate(model.layers):
        x = layer(x, kept, place == 2, place == 1)
    return x


def cache_for_the_result(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    kept: dict[str, Tensor] = {}
    for place, layer in enumerate(model.layers):
        x = layer(x, kept, False, place == 1)
    return x + kept["y"].mean()


def dropout_for_all(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    noise = F.dropout(torch.ones_like(x), 0.5)
    for layer in model.layers[:3]:
        x = layer(x * noise)
    return model.layers[3](x)


def coin(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    for layer in model.layers:
        if float(torch.rand([])) < 0.5:
            x = x + 0.0
        x = layer(x)
    return x


class Reversible(torch.autograd.Function):
    """Runs a layer without a graph, and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer, ctx.x = layer, x.detach()
        return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return x.grad, None


def reversible(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    x = Reversible.apply(model.layers[0](x), model.layers[1])  # type: ignore[no-untyped-call]
    return model.layers[3](model.layers[2](x))


REFUSED = [
    (reversible, Block, 3, ["at most 3 stages", "layers.1 (Block) is called inside an autograd function"]),
    (cache, Keeping, 3, ["at most 3 stages", "layers.1 (Keeping) keeps a tensor", "layers.2 (Keeping) reads it"]),
    (cache_for_the_result, Keeping, 2, ["at most 2 stages", "layers.1 (Keeping) keeps", "head (Linear) reads it"]),
    (dropout_for_all, Block, 2, ["at most 2 stages", "Net draws random numbers", "layers.0 (Block)", "layers.2 (Block)"]),
    (coin, Block, 1, ["cannot be divided", "Net draws random numbers"]),
]


def test_what_cannot_go_over_a_border_stays_in_one_stage_or_is_refused() -> None:
    def check(row: tuple[Callable[..., Tensor], type[nn.Module], int, list[str]]) -> None:
        glue, block, fits, said = row
        with pytest.raises(UnsupportedError) as caught:
            plan_of(build(glue, block))
        assert all(part in str(caught.value) for part in said), caught.value
        if fits > 1 and glue is not dropout_for_all:
            check_exact(build(glue, block), plan_of(build(glue, block), fits))

    each(REFUSED, check)


def no_layer_dropout(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    for layer in model.layers:
        if torch.rand([]) < 0.0:
            continue
        x = layer(x)
    return x


def masked_once(model: Net, x: Tensor, ids: Tensor) -> Tensor:
    return straight(model, F.dropout(x, 0.5), ids) + model.drop(x)


def test_random_numbers_for_one_stage_and_decisions_already_taken_are_fine() -> None:
    check_exact(build(no_layer_dropout), plan_of(build(no_layer_dropout)))
    plan = plan_of(build(masked_once))
    assert crossing_names(plan)[0] == ["embed[0]", "layers.0[0]"]


# -- other calls of the same model --------------------------------------------------------------------------------------


def test_another_call_keeps_the_stages() -> None:
    model = build(straight)
    plan = plan_of(model)
    bare = skeleton(model)
    again = replan(bare.eval(), plan, {name: tensor.to("meta") for name, tensor in {**call(), "labels": call()["ids"]}.items()})
    assert (again.calls, again.crossings, again.holders) == (plan.calls, plan.crossings, plan.holders)


def test_a_plan_goes_through_json() -> None:
    plan = plan_of(build(changed_in_place))
    assert plan.changed
    assert PipelinePlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_another_call_that_needs_what_its_stages_do_not_have_is_refused() -> None:
    model = build(straight)
    plan = plan_of(model)
    bare = skeleton(model)
    holders = {**plan.holders, "scale": (0,)}
    moved = PipelinePlan(plan.stages, plan.calls, plan.crossings, holders)
    with pytest.raises(UnsupportedError, match="needs scale on stage 3 of 4, which 0 holds"):
        replan(bare, moved, {**call(), "scaled": True})
    bare.glue = one_layer_over_and_over  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"begin with layers.1, layers.2, layers.3, and the model does not call layers.2 here"):
        replan(bare, plan, call())
