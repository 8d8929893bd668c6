"""Trains a tiny model of every causal language model over slices of sequences and compares it with whole ones.

python -m tests.sequence_parallel.breadth                   # over 2 ranks (two minutes); writes the table of docs/sequence-parallel.md
python -m tests.sequence_parallel.breadth LlamaForCausalLM  # prints its row
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support import ranks, zoo
from tests.support.sequences import loss_over_slices
from tests.tensor_parallel.breadth import perturb

LOSS, GRAD = 1e-5, 1e-4
PADDED = 5  # tokens
RESULTS = Path(__file__).resolve().parents[1] / "data" / "sp_breadth.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "sequence-parallel.md"
START, STOP = "<!-- breadth: made by python -m tests.sequence_parallel.breadth -->", "<!-- end of breadth -->"


@dataclass
class Row:
    """One architecture: relative errors of loss and gradients, or why it is refused."""

    name: str
    model_type: str
    loss: float = 0.0
    grad: float = 0.0
    refused: str = ""
    error: str = ""

    @property
    def exact(self) -> bool:
        """Equal to whole sequences."""
        return not (self.refused or self.error) and self.loss < LOSS and self.grad < GRAD


def measure(name: str) -> Row:
    """One architecture, on this rank of the group."""
    from hf_zero.errors import HfZeroError
    from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
    from hf_zero.sequence_parallel.batches import UlyssesSPDataLoaderAdapter

    row = Row(name, zoo.architecture(name).model_type)
    whole, divided = zoo.build(name), zoo.build(name)
    perturb(whole), perturb(divided)
    batch: dict[str, Any] = zoo.batch(name, torch.Generator().manual_seed(0))
    pad(batch, getattr(whole.config, "pad_token_id", None))
    try:
        torch.manual_seed(3)
        expected = whole(**batch).loss
        expected.backward()
    except Exception as error:  # noqa: BLE001 - any of them says that it takes no such batch
        row.error = f"whole sequences end with {type(error).__name__}: {str(error).splitlines()[0][:90]}"
    try:
        state = UlyssesSPAttentionHF.register_with_transformers(divided, None, ranks.world(), 2)
        assert state is not None
        if row.error:  # of a model that would be sliced
            return row
        torch.manual_seed(3)
        group = state.get_sequence_parallel_group()
        slices = next(UlyssesSPDataLoaderAdapter([batch], ranks.rank(), group, ranks.world(), "cpu"))
        loss = loss_over_slices(divided, slices, group)
        loss.backward()
    except HfZeroError as error:
        row.refused = str(error)
        return row
    except Exception as error:  # noqa: BLE001 - to be told in the table
        row.error = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
        return row
    row.loss = float((loss.detach() - expected.detach()).abs() / expected.detach().abs())
    row.grad = worst_gradient(whole, divided)
    return row


def pad(batch: dict[str, Any], padding: int | None) -> None:
    """Makes ``batch`` what a tokenizer and a collator would give: no positions, and the second row padded on the left."""
    tokens, labels = batch["input_ids"], batch["labels"]
    if labels.shape != tokens.shape:
        return
    batch["attention_mask"] = torch.ones_like(tokens)
    batch["attention_mask"][1, :PADDED] = 0
    tokens[1, :PADDED] = padding if isinstance(padding, int) and padding >= 0 else 0
    labels[1, :PADDED] = -100


def worst_gradient(whole: nn.Module, divided: nn.Module) -> float:
    """Largest difference against the largest element of all; the ranks' mean is what is compared."""
    worst = 0.0
    largest = max(float(param.grad.abs().max()) for param in whole.parameters() if param.grad is not None)
    for mine, theirs in zip(divided.parameters(), whole.parameters(), strict=True):
        grad = mine.grad if mine.grad is not None else torch.zeros_like(mine)
        torch.distributed.all_reduce(grad)
        expected = theirs.grad if theirs.grad is not None else torch.zeros_like(theirs)
        worst = max(worst, float((grad / ranks.world() - expected).abs().max()) / largest)
    return worst


def measure_each(names: list[str]) -> list[Row]:
    """Rows of ``names``, one after the other, on this rank."""
    warnings.simplefilter("ignore")
    return [measure(name) for name in names]


def measure_all(names: list[str], at_once: int = 6, world: int = 2, each: Callable[[list[str]], list[Row]] = measure_each) -> list[Row]:
    """Rows of ``names`` by ``each``; a group that hangs or dies is tried one by one."""
    rows: list[Row] = []
    for start in range(0, len(names), at_once):
        part = names[start : start + at_once]
        try:
            rows += ranks.run_ranks(each, world, part, timeout=300.0)[0]
        except ranks.RankError as error:
            if len(part) > 1:
                rows += [row for name in part for row in measure_all([name], 1, world, each)]
            else:
                rows.append(Row(part[0], zoo.architecture(part[0]).model_type, error=str(error).strip().splitlines()[-1][:120]))
        for row in rows[-len(part) :]:
            print(
                row.name, "exact" if row.exact else row.refused or row.error or f"WRONG loss {row.loss:.1e} grad {row.grad:.1e}", flush=True
            )
    return rows


def causal() -> list[str]:
    """Every causal language model of the installed transformers."""
    return [found.name for found in zoo.architectures() if found.task == "causal"]


def saved() -> list[Row]:
    """The published results."""
    return [Row(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))]


def table(rows: list[Row]) -> str:
    """The generated part of the page."""
    import transformers

    exact, refused = [row for row in rows if row.exact], [row for row in rows if row.refused]
    rest = [row for row in rows if not (row.exact or row.refused)]
    lines = [
        START,
        f"{len(rows)} causal language models of transformers {transformers.__version__}, tiny, on 2 gloo ranks, fp32, against whole",
        "sequences on one rank that get the batch as a tokenizer gives it, without positions, one row padded on the left (loss and every",
        f"gradient): **{len(exact)} exact**, {len(refused)} refused by name, none that trains with other numbers "
        f"({', '.join(f'{row.name}: {row.error}' for row in rest)}).",
        "",
        "Exact: " + ", ".join(sorted(row.name.removesuffix("ForCausalLM") for row in exact)) + ".",
        "",
        "| refused because | models |",
        "|---|---|",
        *(f"| {reason} | {', '.join(sorted(names))} |" for reason, names in sorted(reasons_of(rows).items())),
    ]
    return "\n".join([*lines, STOP])


def reasons_of(rows: list[Row]) -> dict[str, list[str]]:
    """The models that are refused, by reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.refused:
            reasons.setdefault(_reason(row), []).append(row.name.removesuffix("ForCausalLM"))
    return reasons


def _reason(row: Row) -> str:
    told = {
        "does not keep one hidden state per token": "its layers see more tokens than it was given",
        "virtual tokens, images": "it puts images before the tokens",
        "sees later tokens": "its attention sees later tokens",
        "sequence length": "its sequences must have one length that its configuration names",
        "takes no position_ids": "`forward` takes no `position_ids`",
        "has layers of type": "layers that pass states along the tokens, or choose among them, outside of attention",
        "has other towers": "there are other towers beside the text model",
        "does not call its attention": "attention is not called through transformers' table of attention functions",
        "pixel_values of a batch": "it needs images or audio in every batch",
    }
    return next((text for part, text in told.items() if part in row.refused), row.refused or row.error).replace("|", "/")


def main() -> None:
    """Measures, prints, and publishes if all were measured."""
    found = measure_all(sys.argv[1:] or causal())
    print(f"{sum(row.exact for row in found)} of {len(found)} exact")
    if sys.argv[1:]:
        return
    RESULTS.write_text(json.dumps([asdict(row) for row in found], indent=0) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.split(START)[0] + table(found) + page.split(STOP)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
