"""Define a metric for `evaluate`: F1 of class 1 and accuracy, as in GLUE's MRPC, without the hub.

evaluate.load("examples/text_classification/f1_accuracy.py").compute(predictions=[1, 0], references=[1, 1])
"""

from __future__ import annotations

import datasets
import evaluate

_DESCRIPTION = "F1 of class 1 and accuracy of a classification into two classes."


class F1Accuracy(evaluate.Metric):
    """F1 and accuracy of all added predictions; F1 is 0 if class 1 occurs neither in predictions nor in references."""

    def _info(self) -> evaluate.MetricInfo:
        integers = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description="", features=integers)

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        pairs = list(zip(predictions, references, strict=True))
        hits = sum(predicted == expected == 1 for predicted, expected in pairs)
        mentions = sum(predicted == 1 for predicted, _ in pairs) + sum(expected == 1 for _, expected in pairs)
        right = sum(predicted == expected for predicted, expected in pairs)
        return {"f1": 2 * hits / mentions if mentions else 0.0, "accuracy": right / len(pairs)}
