"""Define a metric for `evaluate`: corpus BLEU computed by sacrebleu, without the hub.

evaluate.load("examples/seq2seq/bleu.py").compute(predictions=["a b c d"], references=["a b c d"])
"""

from __future__ import annotations

import datasets
import evaluate

_DESCRIPTION = "Corpus BLEU (0 to 100) of texts with one reference each, as sacrebleu defines it."


class Bleu(evaluate.Metric):
    """Corpus BLEU of all added predictions."""

    def _info(self) -> evaluate.MetricInfo:
        texts = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description="", features=texts)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        import sacrebleu

        return {"bleu": sacrebleu.corpus_bleu(list(predictions), [list(references)]).score}
