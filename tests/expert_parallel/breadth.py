"""Divides the experts of a tiny model of every text mixture of transformers over 2 and over 4 ranks and compares it with one process.

python -m tests.expert_parallel.breadth                         # every column; writes the table of docs/experts.md
python -m tests.expert_parallel.breadth --ranks 4               # over 4 ranks; the rows of the others stay
python -m tests.expert_parallel.breadth --split                 # over 2 that split the layers too (tensor parallelism)
python -m tests.expert_parallel.breadth MixtralForCausalLM      # prints its rows
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support import ranks, zoo
from tests.tensor_parallel.breadth import DOUBLE, GRAD, LOSS, perturb, relative

WORLDS = (2, 4)
COLUMNS = {
    (2, False): "over 2 ranks",
    (4, False): "over 4 ranks",
    (2, True): "over 2 ranks that split the layers too (`autotp_size` 2), which are given one batch",
}
RESULTS = Path(__file__).resolve().parents[1] / "data" / "ep_breadth.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "experts.md"
START, STOP = "<!-- breadth: made by python -m tests.expert_parallel.breadth -->", "<!-- end of breadth -->"
AUTO_EP = ("mixtral", "qwen3_moe", "qwen3_5_moe", "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3")  # DeepSpeed's presets
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts", "n_experts")


@dataclass
class Row:
    """One architecture over one number of ranks: largest relative errors, share of the parameters in experts, or why not."""

    name: str
    model_type: str
    world: int
    loss: float = 0.0
    grad: float = 0.0
    double: float = 1.0  # the gradients' error in float64, where that in fp32 is above ``GRAD``
    share: float = 0.0
    plan: bool = False  # transformers has an expert plan of its own for it
    error: str = ""
    split: bool = False  # the ranks split the layers between them too

    @property
    def exact(self) -> bool:
        """Equal to one process."""
        return not self.error and self.loss < LOSS and (self.grad < GRAD or self.double < DOUBLE)


def mixtures() -> list[str]:
    """Architectures whose configuration counts experts, of which a tiny model can be built."""
    found = []
    for item in zoo.architectures():
        try:
            model = zoo.build(item.name)
        except Exception:  # no tiny configuration in this version of transformers
            continue
        if any("expert" in name for name, _ in model.named_modules()) or _counts_experts(model.config):
            found.append(item.name)
    return found


def _counts_experts(config: Any) -> bool:
    parts = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]
    return any(isinstance(getattr(part, name, None), int) and getattr(part, name) > 1 for part in parts for name in COUNTS)


def measure(name: str, split: bool = False, dtype: torch.dtype = torch.float32) -> Row:
    """One architecture, experts over all ranks of the job, on this rank; its batch is its own, unless they ``split`` the layers too."""
    from hf_zero.comm.axes import divide_experts
    from hf_zero.comm.back_end import build_collectives
    from hf_zero.comm.topology import build_topology
    from hf_zero.core.units.marks import cut, tp_shard_of
    from hf_zero.expert_parallel.apply import divide_model
    from hf_zero.expert_parallel.find import modules_of_experts
    from hf_zero.integrations import attach  # noqa: F401 - registers our functions with transformers
    from hf_zero.tensor_parallel.split import split_model

    world, rank = ranks.world(), 0 if split else ranks.rank()
    row = Row(name, zoo.architecture(name).model_type, world, split=split)
    whole, divided = (_model(name, dtype) for _ in range(2))
    row.plan = bool(getattr(whole, "_ep_plan", None))
    expected, losses = _reference(whole, name, 1 if split else world)
    topology = divide_experts(build_topology(model_parallel=world if split else 1), world)
    if split:
        split_model(divided, {}, topology, keeps=modules_of_experts(divided))
    divide_model(divided, topology)
    loss = _loss(divided, name, rank)
    loss.backward()
    row.loss = relative(loss.detach(), losses[rank])
    floor = 1e-4 * max(float(grad.abs().max()) for grad in expected.values())
    everyone = build_collectives(topology)
    total = sum(param.numel() for param in whole.parameters())
    experts = 0
    for key, param in divided.named_parameters():
        part, grad = tp_shard_of(param), param.grad if param.grad is not None else torch.zeros_like(param)
        wanted = expected[key]
        scale = max(float(wanted.abs().max()), floor) if wanted.numel() else floor
        if part is None:
            everyone.all_reduce(grad, key).wait()
        else:
            experts += wanted.numel() if part.expert else 0
            wanted = cut(wanted, part)
        row.grad = max(row.grad, float((grad - wanted).abs().max() / scale) if wanted.numel() else 0.0)
    row.share = experts / total
    largest = torch.tensor(row.grad)
    build_collectives(build_topology()).all_reduce(largest, "largest error", torch.distributed.ReduceOp.MAX).wait()
    row.grad = float(largest)
    if row.grad >= GRAD and dtype == torch.float32:
        row.double = measure(name, split, torch.float64).grad
    return row


def _model(name: str, dtype: torch.dtype) -> nn.Module:
    model = zoo.build(name)
    perturb(model)
    return model.to(dtype)


def _loss(model: nn.Module, name: str, rank: int) -> torch.Tensor:
    torch.manual_seed(3)
    return zoo.loss(model, zoo.batch(name, torch.Generator().manual_seed(rank)))


def _reference(model: nn.Module, name: str, world: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The gradients of all ranks' losses together, and each loss."""
    losses = [_loss(model, name, rank) for rank in range(world)]
    torch.stack([loss.view(()) for loss in losses]).sum().backward()
    grads = {key: param.grad if param.grad is not None else torch.zeros_like(param) for key, param in model.named_parameters()}
    return grads, [loss.detach() for loss in losses]


def measure_each(names: list[str], split: bool) -> list[Row]:
    """On a rank of the pool: every architecture, errors noted."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = []
    for name in names:
        try:
            rows.append(measure(name, split))
        except Exception as error:  # an architecture that fails is a row of the table
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            rows.append(Row(name, zoo.architecture(name).model_type, ranks.world(), error=text[:200], split=split))
    return rows


def measure_all(names: list[str], world: int, split: bool = False, at_once: int = 6) -> list[Row]:
    """The worse of the ranks' rows for every name."""
    rows: list[Row] = []
    for start in range(0, len(names), at_once):
        some = names[start : start + at_once]
        outcomes = ranks.observe_ranks(measure_each, world, some, split, timeout=120 * world, group_timeout=60)
        broken = any(outcome.ok and any("CollectiveError" in row.error for row in outcome.value) for outcome in outcomes)
        if all(outcome.ok for outcome in outcomes) and not (broken and len(some) > 1):
            rows.extend(
                max(row, key=lambda row: (bool(row.error), row.grad, row.loss)) for row in zip(*[o.value for o in outcomes], strict=True)
            )
        elif len(some) > 1:
            rows.extend(measure_all(some, world, split, 1))
        else:
            rows.append(Row(some[0], zoo.architecture(some[0]).model_type, world, error="the ranks did not finish", split=split))
        print(f"{len(rows)} of {len(names)}", file=sys.stderr, flush=True)
    return rows


Key = tuple[str, int, bool]  # name, ranks, whether they split the layers too


def saved() -> dict[Key, Row]:
    """The rows that were measured last."""
    entries = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    return {key_of(row): row for row in (Row(**entry) for entry in entries)}


def key_of(row: Row) -> Key:
    """What tells ``row`` from others."""
    return row.name, row.world, row.split


def table(rows: dict[Key, Row]) -> str:
    """The generated part of the page."""
    import transformers

    names = sorted({name for name, _, _ in rows})
    lines = [
        START,
        f"{len(names)} architectures of transformers {transformers.__version__} with experts, tiny, on gloo, fp32, each rank with a batch",
        "of its own, against one process (every rank's loss, every gradient):",
        "",
    ]
    for (world, split), how in COLUMNS.items():
        some = [row for row in rows.values() if (row.world, row.split) == (world, split)]
        refused = [row for row in some if row.error]
        wrong = [row for row in some if not row.error and not row.exact]
        lines.append(f"- {how}: **{sum(row.exact for row in some)} exact**, {len(refused)} refused by name, {len(wrong)} wrong.")
    lines += [
        "",
        "| architecture | of its parameters in experts | over 2 | over 4 | over 2, layers too | plan in transformers | AutoEP preset |",
        "|---|---:|---|---|---|---|---|",
    ]
    for name in names:
        found = [rows.get((name, *column)) for column in COLUMNS]
        one = next((row for row in found if row is not None), None)
        assert one is not None
        share = f"{one.share:.0%}" if not one.error else ""
        others = f"{'yes' if one.plan else ''} | {'yes' if one.model_type in AUTO_EP else ''}"
        lines.append(f"| {name} | {share} | {' | '.join(map(_result, found))} | {others} |")
    return "\n".join([*lines, STOP])


def _result(row: Row | None) -> str:
    if row is None:
        return ""
    if row.error:
        return "refused" if row.error.startswith(("UnsupportedError", "ConfigError")) else row.error.replace("|", "/")
    if not row.exact:
        return "differs"
    return "exact" + (f" (rounding of a gradient near zero: {row.double:.0e} in float64)" if row.grad >= GRAD else "")


def write(found: list[Row]) -> None:
    """Puts ``found`` among the results, and writes the page."""
    rows = {**saved(), **{key_of(row): row for row in found}}
    RESULTS.write_text(json.dumps([asdict(row) for row in rows.values()], indent=0) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.split(START)[0] + table(rows) + page.split(STOP)[1], encoding="utf-8")


def main() -> None:
    """Measures the named architectures and prints them, or all and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures to print; none: all, for the page")
    parser.add_argument("--ranks", type=int, nargs="*", default=[], choices=WORLDS)
    parser.add_argument("--split", action="store_true", help="over 2 ranks that split the layers too")
    arguments = parser.parse_args()
    asked = [*((world, False) for world in arguments.ranks), *([(2, True)] if arguments.split else [])]
    for world, split in asked or COLUMNS:
        rows = measure_all(arguments.names or mixtures(), world, split)
        if arguments.names:
            print(*rows, sep="\n")
        else:
            write(rows)


if __name__ == "__main__":
    main()
