"""Trains a tiny model of every causal language model under context parallelism and compares it with one rank.

python -m tests.sequence_parallel.context_breadth                   # over 2 ranks; writes the table of docs/sequence-parallel.md
python -m tests.sequence_parallel.context_breadth LlamaForCausalLM  # prints its row
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.sequence_parallel.breadth import PAGE, Row, causal, measure_all, pad, reasons_of, worst_gradient
from tests.support import ranks, zoo
from tests.tensor_parallel.breadth import perturb

RESULTS = Path(__file__).resolve().parents[1] / "data" / "context_breadth.json"
START, STOP = "<!-- breadth: made by python -m tests.sequence_parallel.context_breadth -->", "<!-- end of context breadth -->"


def measure(name: str) -> Row:
    """One architecture, on this rank of the group, with a batch as a tokenizer gives it."""
    from hf_zero.comm.topology import build_topology, context_topology
    from hf_zero.errors import HfZeroError
    from hf_zero.sequence_parallel.forward import SliceSettings
    from hf_zero.sequence_parallel.state import ContextParallel
    from hf_zero.sequence_parallel.table import standing_in, trade_in_attention

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
        row.error = f"one rank ends with {type(error).__name__}: {str(error).splitlines()[0][:90]}"
    try:
        groups = context_topology(build_topology(), ranks.world())
        ContextParallel(*groups, SliceSettings(None, True, None, trade_in_attention, standing_in)).bind(divided)
        if row.error:  # of a model that would be divided
            return row
        torch.manual_seed(3)
        loss = divided(**batch).loss
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


def measure_each(names: list[str]) -> list[Row]:
    """Rows of ``names``, one after the other, on this rank."""
    warnings.simplefilter("ignore")
    return [measure(name) for name in names]


def saved() -> list[Row]:
    """The published results."""
    return [Row(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))]


def table(rows: list[Row]) -> str:
    """The generated part of the page."""
    import transformers

    exact = [row for row in rows if row.exact]
    rest = [row for row in rows if not (row.exact or row.refused)]
    lines = [
        START,
        f"Of {len(rows)} causal language models of transformers {transformers.__version__}, tiny, on 2 gloo ranks, fp32, against one rank,",
        f"one row padded on the left (loss and every gradient): **{len(exact)} exact**, {len(rows) - len(exact) - len(rest)} refused by "
        "name, none that",
        f"trains with other numbers ({', '.join(f'{row.name}: {row.error}' for row in rest)}).",
        "",
        "| refused because | models |",
        "|---|---|",
        *(f"| {reason} | {', '.join(sorted(names))} |" for reason, names in sorted(reasons_of(rows).items())),
    ]
    return "\n".join([*lines, STOP])


def main() -> None:
    """Measures, prints, and publishes if all were measured."""
    found = measure_all(sys.argv[1:] or causal(), each=measure_each)
    print(f"{sum(row.exact for row in found)} of {len(found)} exact")
    if sys.argv[1:]:
        return
    RESULTS.write_text(json.dumps([asdict(row) for row in found], indent=0) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.split(START)[0] + table(found) + page.split(STOP)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
