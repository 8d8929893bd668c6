"""Whatever a script does is what plain PyTorch would have done, or one error on all ranks that names it: drawn scripts on both sides."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.script_grammar import Script, parse
from tests.support.script_known import KNOWN_OPEN, known, mended, without_known
from tests.support.script_report import draw, shrink
from tests.support.script_verdict import Verdict, verdicts_of

SHOWN = 5  # failures that are made small


def _check(scripts: Sequence[Script]) -> None:
    failed = [(script, verdict) for script, verdict in zip(scripts, verdicts_of(scripts), strict=True) if not verdict.good]
    if failed:
        small = [shrink(script, verdict, _quickly) for script, verdict in failed[:SHOWN]]
        shown = "\n".join(f"--- {verdict.word} at operation {verdict.place}: {verdict.text}\n{script}" for script, verdict in small)
        pytest.fail(f"{len(failed)} of {len(scripts)} scripts failed; python -m tests.support.script_report run tries one by hand\n{shown}")


def _quickly(scripts: Sequence[Script]) -> list[Verdict]:
    return verdicts_of(scripts, timeout=15)


def test_drawn_scripts_are_exact_or_refused_by_name() -> None:
    _check([without_known(script) for script in draw(200)])


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_many_drawn_scripts_are_exact_or_refused_by_name() -> None:
    for _ in range(10):
        _check([without_known(script) for script in draw(500)])


def test_scripts_that_failed_once() -> None:
    _check([script for script in mended() if known(script) is None])


def test_an_open_fault_is_left_out_of_the_scripts_that_show_it() -> None:
    for one in KNOWN_OPEN:
        assert one.scripts, one
        for text in one.scripts:
            script = parse(text)
            assert known(script) is not None, f"{one.pattern} does not match {text}"
            assert known(without_known(script)) is None, text
