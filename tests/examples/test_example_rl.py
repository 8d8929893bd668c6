"""The example with a server in another process: rewards rise, and the server has the weights of each step."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from tests.support import processes, ranks, weight_server
from tests.support.examples import EXAMPLES, modules

LINE = re.compile(r"step (\d+): reward ([\d.]+), weights sent in [\d.]+ s, the server has them: (\w+)")


def _train(*flags: str) -> list[tuple[str, ...]]:
    with modules("rl", "train") as found, mock.patch("sys.argv", ["train.py", *flags]):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            found.train.main()
    return LINE.findall(printed.getvalue())


def _check(url: str, over: str, stage: int, steps: int, gain: float) -> list[str]:
    lines, nothing = ranks.run_ranks(_train, 2, "--server", url, "--over", over, "--stage", str(stage), "--steps", str(steps), timeout=200)
    assert nothing == [] and [int(step) for step, _, _ in lines] == list(range(steps))
    assert {same for _, _, same in lines} == {"True"}
    rewards = [reward for _, reward, _ in lines]
    assert float(rewards[-1]) > float(rewards[0]) + gain
    return rewards


def test_the_server_has_the_weights_of_each_step() -> None:
    with modules("rl", "policy") as found:
        policy = found.policy.load_policy("toy")
    with weight_server.serving(policy) as url:
        _check(url, "gloo", 3, 8, 0.1)


@contextmanager
def _started() -> Iterator[str]:
    """The server as its page starts it; its URL."""
    command = [sys.executable, str(EXAMPLES / "rl" / "server.py"), "--model", "toy", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=processes.environment()) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[-1]
        finally:
            server.kill()


@pytest.mark.slow
def test_every_stage_and_way_gives_the_same_rewards() -> None:
    with _started() as url:
        found = [_check(url, over, stage, 15, 0.3) for over, stage in (("gloo", 0), ("http", 1), ("gloo", 2), ("http", 3))]
    assert all(rewards == found[0] for rewards in found)


def test_bad_requests_are_told_and_the_server_goes_on() -> None:
    with modules("rl", "policy", "senders") as found, weight_server.serving(found.policy.load_policy("toy")) as url:
        with pytest.raises(urllib.error.HTTPError, match="400"):
            found.senders.post(f"{url}/update_weights", {"update_info": {}})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            found.senders.post(f"{url}/v1/nothing", {})
        answer = found.senders.post(
            f"{url}/v1/completions", {"prompt": [[3, 4], [5]], "n": 2, "max_tokens": 3, "temperature": 1.0, "top_k": 4}
        )
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[3, 4], [3, 4], [5], [5]]
        assert all(len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) <= 3 for choice in answer["choices"])
