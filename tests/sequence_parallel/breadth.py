"""Trains a tiny model of every causal language model over slices of sequences and compares it with whole ones.

python -m tests.sequence_parallel.breadth                   # over 2 ranks (two minutes); writes the table of docs/sequence-parallel.md
python -m tests.sequence_parallel.breadth LlamaForCausalLM  # prints its row
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.sequence_parallel.compared import Compared, Losses, compare, measure_all, publish, published
from tests.support import ranks, zoo
from tests.support.sequences import loss_over_slices
from tests.tensor_parallel.breadth import perturb

PADDED = 5  # tokens
RESULTS = Path(__file__).resolve().parents[1] / "data" / "sp_breadth.json"
START, STOP = "<!-- breadth: made by python -m tests.sequence_parallel.breadth -->", "<!-- end of breadth -->"


@dataclass
class Row(Compared):
    """One architecture."""

    model_type: str = ""


def row_of(name: str) -> Row:
    """An architecture that was not measured yet."""
    return Row(name, model_type=zoo.architecture(name).model_type)


def measure(name: str) -> Row:
    """One architecture, on this rank of the group."""
    from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
    from hf_zero.sequence_parallel.batches import UlyssesSPDataLoaderAdapter

    def bind(model: nn.Module) -> Any:
        return UlyssesSPAttentionHF.register_with_transformers(model, None, ranks.world(), 2)

    def loss_of(model: nn.Module, batch: dict[str, Any], state: Any) -> torch.Tensor:
        group = state.get_sequence_parallel_group()
        return loss_over_slices(model, next(UlyssesSPDataLoaderAdapter([batch], ranks.rank(), group, ranks.world(), "cpu")), group)

    return measured(name, bind, loss_of)


def measured(name: str, bind: Callable[[nn.Module], Any], loss_of: Callable[[nn.Module, dict[str, Any], Any], torch.Tensor]) -> Row:
    """One architecture that ``bind`` makes train over parts of sequences, and whose loss of a whole batch is that of ``loss_of``."""
    whole, divided = zoo.build(name), zoo.build(name)
    perturb(whole), perturb(divided)
    batch: dict[str, Any] = zoo.batch(name, torch.Generator().manual_seed(0))
    pad(batch, getattr(whole.config, "pad_token_id", None))

    def trained(loss: Callable[[], torch.Tensor]) -> Losses:
        torch.manual_seed(3)
        found = loss()
        found.backward()
        return [found]

    return compare(
        row_of(name),
        whole,
        divided,
        lambda: trained(lambda: whole(**batch).loss),
        lambda: bind(divided),
        lambda bound: trained(lambda: loss_of(divided, batch, bound)),
    )


def pad(batch: dict[str, Any], padding: int | None) -> None:
    """Makes ``batch`` what a tokenizer and a collator would give: no positions, and the second row padded on the left."""
    tokens, labels = batch["input_ids"], batch["labels"]
    if labels.shape != tokens.shape:
        return
    batch["attention_mask"] = torch.ones_like(tokens)
    batch["attention_mask"][1, :PADDED] = 0
    tokens[1, :PADDED] = padding if isinstance(padding, int) and padding >= 0 else 0
    labels[1, :PADDED] = -100


def causal() -> list[str]:
    """Every causal language model of the installed transformers."""
    return [found.name for found in zoo.architectures() if found.task == "causal"]


def saved() -> list[Row]:
    """The published results."""
    return published(Row, RESULTS)


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


def reasons_of(rows: Sequence[Row]) -> dict[str, list[str]]:
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
    found = measure_all(measure, sys.argv[1:] or causal(), row_of)
    print(f"{sum(row.exact for row in found)} of {len(found)} exact")
    if not sys.argv[1:]:
        publish(found, RESULTS, table(found))


if __name__ == "__main__":
    main()
