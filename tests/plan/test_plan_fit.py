"""``hf-zero plan --fit``: what it finds is what trying everything finds, and what it writes trains."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config import config_args
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_zero.cli import main
from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.plan import fit, progress
from hf_zero.plan.candidates import Candidate, Family, Layout, Space, Tier, families_of, layouts_of, tiers_of
from hf_zero.plan.command import settled
from hf_zero.plan.costs import MEASURED, Costs, Part, extrapolated, rates_of
from hf_zero.plan.few_blocks import blocks_of
from hf_zero.plan.inputs import Cluster, Hardware, Load, ModelWish
from hf_zero.plan.measure import measure
from hf_zero.plan.planner import Planner
from hf_zero.plan.search import Answer, Excluded, Search
from hf_zero.plan.workers import Task, Workers
from hf_zero.plan.written import places, write, write_files
from hf_zero.tensor_parallel.plan import ranges_of
from hf_zero.tensor_parallel.symbolic_dims import SymbolicDim, indices
from tests.support import accelerate_loop
from tests.support.launches import launch_on_ranks, report_of
from tests.support.planned import LLAMA
from tests.support.processes import until
from tests.support.versions import PARALLELISM_CONFIG

TOY = {**LLAMA, "num_hidden_layers": 2}
FP32: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
LENGTH = 16


DIVIDED = [Layout(), Layout(tensor=2), Layout(sequence=2), Layout(pipeline=2), Layout(shard_group=2), Layout(sequence=2, context=2)]


def planner(settings: dict[str, Any], memory: int, global_batch: int = 4, ranks: int = 2, recomputes: Sequence[int] = (1,)) -> Planner:
    """For ranks on CPUs."""
    space = Space(FP32, ranks, global_batch, [Layout()], tiers_of(True, ""), recomputes=recomputes)
    cluster = Cluster(ranks, ranks, on_host=True)
    return Planner(space, blocks_of(ModelWish("llama", settings)), cluster, Hardware(memory=memory), LENGTH, "sdpa", settled)


def candidates(space: Space) -> list[Candidate]:
    return [
        space.candidate(family, size)
        for layout in space.layouts
        for family in families_of(space, layout)
        for size in space.micro_batches(layout)
    ]


def made_up(one: Candidate) -> Costs:
    """Numbers that grow and fall as real ones do, so that every kind of reason occurs."""
    family, size = one.family, one.micro_batch
    held = (9_000, 6_000, 5_800, 6_500)[family.stage] + size * (1_000 - 500 * family.share) - 800 * (one.accumulation == 1)
    work = Part(1e9 * (3 + family.share), 0, 0, 10 * one.accumulation, 1e6 * family.stage * one.accumulation, 0, 0)
    return Costs(0, held + 4 * family.share, 0, work, Part(0, 0, 0, 0, 0, 0, 0), 0, 0, 0)


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_search_finds_what_trying_everything_finds(real: bool) -> None:
    choices = (2, 1) if real else (4, 2, 1)
    everything = planner(TOY, 1, 4 if real else 16, recomputes=choices)
    rates = rates_of({}, {}, 2, on_host=True)
    costs = {one: everything.costs(one, whole=True)[0] if real else made_up(one) for one in candidates(everything.space)}
    hosts = sorted({one.host for one in costs.values()})
    for limit in hosts if not real else (hosts[0], hosts[len(hosts) // 2], hosts[-1]):
        searching = planner(TOY, 2 * round(limit), everything.space.global_batch, recomputes=choices)
        searching._costs = {(one, True): found for one, found in costs.items()}
        answer = Search(searching, rates).run()
        fits = {one for one, found in costs.items() if found.host <= limit}
        largest = {
            max((one for one in fits if one.family == family), key=lambda one: one.micro_batch) for family in {one.family for one in fits}
        }
        useful = {one for one in largest if not any(_serves_better(other, one) for other in largest)}
        fastest = sorted(rates.seconds(costs[one]) for one in useful)[:5]
        assert [one.seconds for one in answer.best] == fastest
        assert {one.candidate for one in answer.best} <= fits
        assert answer.candidates == len(costs)
        for out in answer.out:
            if "does not fit" in out.reason:
                assert not any(str(one) == out.name or (str(one.family) == out.name) for one in fits), out


def _serves_better(other: Candidate, one: Candidate) -> bool:
    """Whether ``one`` only recomputes or moves more than ``other``, which fits with as many samples."""
    mine, theirs = one.family, other.family
    adds = mine != theirs and theirs.share <= mine.share and theirs.moves <= mine.moves and theirs.tier.within(mine.tier)
    return adds and (mine.layout, mine.stage) == (theirs.layout, theirs.stage) and other.micro_batch >= one.micro_batch


class Remembering(Workers):
    """Plans each task once, for several searches."""

    def __init__(self, plan: Callable[[Task], Costs | HfZeroError]) -> None:
        super().__init__()
        self.plan = plan
        self.told: dict[str, Costs | HfZeroError] = {}

    def costs(self, tasks: Sequence[Task]) -> list[Costs | HfZeroError]:
        self.planned += len(tasks)
        for task in tasks:
            if repr(task) not in self.told:
                self.told[repr(task)] = self.plan(task)
        return [self.told[repr(task)] for task in tasks]


def made_up_device(task: Task) -> Costs:
    """A model of 10^9 parameters on 8 devices, by formulas of the field; the last stage of a pipeline is the smaller one."""
    zero, accumulation, size = task.config["zero_optimization"], task.config["gradient_accumulation_steps"], task.load.micro_batch
    tensor, heads = task.config.get("tensor_parallel", {}).get("autotp_size", 1), task.config.get("sequence_parallel_size", 1)
    sequence = heads * task.config.get("hf_zero", {}).get("context_parallel_size", 1)
    stages, group, stage = task.config.get("pipeline", {}).get("stages", 1), zero.get("mics_shard_size", 0), zero["stage"]
    parts, away = tensor * stages, task.model.moves
    again = 1 / task.model.checkpointing if task.model.checkpointing else 0.0
    shards = group or 8 // parts
    owned, parameters = 12e9 / parts / (shards if stage else 1), 2e9 / parts / (shards if stage == 3 else 1)
    moved = "offload_optimizer" in zero
    held = (
        parameters * ("offload_param" not in zero) + owned * (not moved) + 2e9 / parts / (shards if stage > 1 else 1) * (accumulation > 1)
    )
    kept = size * 1e9 / (parts * sequence) * (1 - 0.7 * again)
    held += kept * (0.4 if away else 1) + 0.2e9 * (stage == 3) + 1e6 * again
    work, sends = 64e12 / 8 * (3 + again), 2e9 / parts * (accumulation if stage > 1 else 1) * (3 if stage == 3 else 1)
    alone = {
        "node_alone": 64 * 2e8 * (tensor - 1) + 64 * 2e7 * (sequence - 1),
        "calls_alone": 100.0 * accumulation * (tensor * sequence > 1),
    }
    micro = Part(
        work,
        64e9 / 8 * 20 + accumulation * 1e9,
        2 * kept * accumulation * away,
        500 * accumulation,
        sends + alone["node_alone"],
        0,
        100 * accumulation,
        **alone,
    )
    update = Part(0, 3 * owned * (not moved), owned / 3 * moved, 50, 2e9 / parts * (stage < 3), 0, 20)
    bubble = (stages - 1) / (2 * stages)
    costs = Costs(held, owned * moved, 0, micro, update, owned * moved, 0, 0, bubble, owned, parameters, 1e9, 1e9)
    return (
        costs if not task.last else replace(costs, device=0.9 * held, micro=replace(micro, read=0.9 * micro.read, flops=0.9 * micro.flops))
    )


@pytest.mark.timeout(1200)
@pytest.mark.fast_rows("by formulas")
@pytest.mark.parametrize(
    ("real", "all_places"), [(False, False), (False, True), (True, True)], ids=["by formulas", "by formulas, more limits", "by the engine"]
)
def test_of_all_ways_to_divide_ranks_the_search_finds_the_best(real: bool, all_places: bool) -> None:
    """Of plans by formulas, and of those of the engine, with pipelines and offload: none of the five fastest is lost to a bound."""
    ranks, batch = (4, 4) if real else (8, 64)
    choices = {} if real else {"moves": True, "recomputes": (2, 1)}
    space = Space(FP32, ranks, batch, DIVIDED[:4] if real else DIVIDED, tiers_of(real, ""), **choices)
    workers = Remembering(Task.costs if real else made_up_device)
    blocks, cluster = blocks_of(ModelWish("llama", TOY)), Cluster(ranks, ranks if real else 4, on_host=real)

    def with_memory(memory: int) -> Planner:
        return Planner(space, blocks, cluster, Hardware(memory=memory), LENGTH, "sdpa", settled, workers=workers)

    everything = with_memory(1)
    everything.prepare(candidates(space), whole=True)
    known = {one: found for (one, _), found in everything._plans.items() if isinstance(found, Costs)}
    assert known
    takes = sorted(everything.excess(costs) for costs in known.values())
    for place in (0.01, 0.1, 0.25, 0.4, 0.6, 0.8, 1.0) if all_places else (0.01, 0.4):
        limit = round(takes[min(len(takes) - 1, int(place * len(takes)))])
        for given in ({}, {"node-link": 2e9}, {"tflops": 5.0, "host-memory": 5e8}):
            rates = rates_of(given, {}, cluster.near, on_host=real)
            answer = Search(with_memory(limit), rates).run()
            fits = [one for one, costs in known.items() if everything.excess(costs) <= limit]
            useful = [one for one in fits if not any(_serves_better(other, one) for other in fits)]
            fastest: dict[Any, float] = {}
            for one in useful:
                fastest[one.family] = min(fastest.get(one.family, float("inf")), rates.seconds(known[one]))
            assert [one.seconds for one in answer.best] == sorted(fastest.values())[:5]
            for out in answer.out:
                least = re.match(r"at least ([\d.e+-]+) s per step (in every configuration|with every micro batch)", out.reason)
                if least:  # it says so of all that it names
                    named = [one for one in known if out.name in (str(one.family.layout), str(one.family))]
                    assert named and min(rates.seconds(known[one]) for one in named) >= 0.999 * float(least[1]), out


def test_nothing_fits_into_a_byte() -> None:
    answer = Search(planner({**TOY, "num_hidden_layers": 1}, 1, global_batch=2), rates_of({}, {}, 2, on_host=True)).run()
    assert not answer.best
    assert len(answer.out) == 8
    assert all("of host memory at the peak, a node has 1 B" in out.reason for out in answer.out)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "every"), [(0, 0), (1, 0), (3, 0), (2, 2), (3, 2)])
def test_few_blocks_say_what_all_do(stage: int, every: int) -> None:
    step = max(1, every)
    whole = planner({**LLAMA, "num_hidden_layers": 6 + 2 * step}, 1, recomputes=(2, 1))
    assert whole.blocks.alike and whole.blocks.every
    one = next(one for one in candidates(whole.space) if (one.family.stage, one.family.recomputes, one.micro_batch) == (stage, every, 1))
    config = settled(whole.space.config(one), 1)
    few_of = [replace(whole.blocks.few(count), checkpointing=every) for count in (4, 4 + step, 4 + 2 * step)]
    few = [
        found
        for found in Workers().costs([Task(wish, config, whole.cluster, Load(1, LENGTH)) for wish in few_of])
        if isinstance(found, Costs)
    ]
    more = 2 // step
    told, real = extrapolated(few, more), whole.costs(one, whole=True)[0]
    assert told == extrapolated(few[:2], more + 1)
    assert told is not None
    assert (told.device, told.disk, told.on_host) == (real.device, real.disk, real.on_host)
    assert told.host == real.host
    assert astuple(told.micro) == pytest.approx(astuple(real.micro), rel=1e-9)
    assert astuple(told.update) == pytest.approx(astuple(real.update), rel=1e-9)


def test_few_blocks_stand_for_all_only_where_no_limit_lies_between() -> None:
    blocks = blocks_of(ModelWish("llama", {**LLAMA, "num_hidden_layers": 40}))
    assert blocks.alike and blocks.counts({}, 1, 2) == (4, 5, 6)
    zero = {"stage": 3, "stage3_max_reuse_distance": 10 * blocks.numel}
    assert blocks.counts({"zero_optimization": zero}, 1, 2) == (6, 7, 8)
    assert blocks.counts({"zero_optimization": zero}, 2, 1) == (11, 12, 13)  # each of two ranks has half of a block
    assert blocks.counts({"zero_optimization": {**zero, "stage3_max_reuse_distance": 60 * blocks.numel}}, 1, 2) is None
    assert blocks.counts({"zero_optimization": {**zero, "stage": 2}}, 1, 2) == (4, 5, 6)
    assert (blocks.counts({}, 1, 2, 4), replace(blocks, count=41).counts({}, 1, 2, 4)) == ((4, 8, 12), (5, 9, 13))
    matched = blocks_of(ModelWish("llama", {**LLAMA, "num_hidden_layers": 40}, trainable="match:layers.7"))
    assert matched.counts({}, 1, 2) is None


@pytest.mark.slow
def test_processes_beside_this_one_tell_the_same() -> None:
    config = settled({"zero_optimization": {"stage": 1}})
    tasks = [Task(ModelWish("llama", {**TOY, "num_hidden_layers": count}), config, Cluster(2, 2, True), Load(1, 8)) for count in (1, 2)]
    alone, several = Workers(), Workers(2, _seconds=60.0)
    with closing(several):
        assert several.costs(tasks) == alone.costs(tasks)
        refused = several.costs([tasks[0], replace(tasks[1], config={**config, "zero_optimization": {"stage": 7}})])[1]
    assert isinstance(refused, ConfigError)
    assert "stage" in str(refused)


@pytest.mark.quick
def test_layouts_keep_to_what_the_configuration_says() -> None:
    assert layouts_of({}, 8, 4, ("tensor", "replicas")) == [Layout(), Layout(shard_group=4), Layout(tensor=2), Layout(tensor=4)]
    assert layouts_of({"tensor_parallel": {"autotp_size": 2}}, 8, 4, ("sequence",)) == [Layout(tensor=2)]
    assert layouts_of({"hf_zero": {"context_parallel_size": 2}}, 8, 4, ("sequence",)) == [Layout(context=2)]
    alone, nodes = [Layout(context=size) for size in (2, 4, 8)], [Layout(sequence=2, context=4), Layout(sequence=4, context=2)]
    assert layouts_of({}, 8, 4, ("context",)) == [Layout(), *alone]
    assert layouts_of({}, 8, 4, ("sequence", "context")) == [Layout(), Layout(sequence=2), Layout(sequence=4), *alone, *nodes]
    assert layouts_of({}, 8, 8, ("sequence", "context"))[-1] == Layout(context=8)  # one node
    assert ("context" in fit._axes(None, False, fit.LONG), "context" in fit._axes(None, False, fit.LONG - 1)) == (True, False)
    space = Space({}, 8, 48, [Layout()], tiers_of(False, "/disk"), nvme_path="/disk")
    divided = space.candidate(Family(nodes[0], 3, Tier(), True), 6)
    assert (str(divided), divided.accumulation) == (
        "stage 3, sequence parallel 2, context parallel 4, recomputed activations, 8 x micro batch 6",
        8,
    )
    assert space.config(divided)["sequence_parallel_size"] == 2 and space.config(divided)["hf_zero"] == {"context_parallel_size": 4}
    assert space.micro_batches(Layout(tensor=2)) == [1, 2, 3, 4, 6, 12]
    assert space.micro_batches(Layout()) == [1, 2, 3, 6]
    disk = next(family for family in families_of(space, Layout(tensor=2)) if (family.stage, family.tier.optimizer) == (1, "nvme"))
    config = space.config(space.candidate(disk, 6))
    assert config["zero_optimization"] == {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}
    assert (config["train_batch_size"], config["gradient_accumulation_steps"], config["tensor_parallel"]["autotp_size"]) == (48, 2, 2)


@pytest.mark.quick
def test_given_wins_over_measured_and_that_over_assumed() -> None:
    rates = rates_of({"tflops": 7.0, "link": None}, {"tflops": 1.0, "memory": 2.0}, 4, on_host=False)
    assert (rates["tflops"], rates.table["tflops"].source, rates.table["memory"].source) == (7.0, "given", MEASURED)
    assert rates.table["link"].source == "assumed"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("model")
    config = GPT2Config(vocab_size=accelerate_loop.VOCAB, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def found(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A search's answer, and the folder it has written."""
    folder = tmp_path_factory.mktemp("found") / "best"
    config = {"zero_optimization": {"stage": 0, "stage3_prefetch_bucket_size": "auto"}}
    words = ["--config", json.dumps(config), "--ranks", "2", "--device", "cpu", "--memory", "1100kB", "--sequence", "8"]
    search = ["--fit", "--axes", "none", "--global-batch", "8", "--micro-batch", "2", "--json", "--write", str(folder)]
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(io.StringIO()) as errors:
        assert main(["plan", str(model), *words, *search]) == 0
    assert "accelerate launch --config_file" in errors.getvalue()
    return folder, json.loads(said.getvalue())


@pytest.mark.quick
def test_excluded_candidates_are_counted_and_a_few_are_named() -> None:
    out = [Excluded(f"family {number}", "not needed: stage 2 fits", "not needed") for number in range(50)]
    lines = fit._excluded_lines(Answer((), (*out, Excluded("pipeline stages 8", "refused: too few blocks", "refused")), 3, 60))
    assert lines[1:3] == ["excluded, refused by the engine (1):", "- pipeline stages 8: refused: too few blocks"]
    assert lines[4].startswith("excluded, not needed") and lines[4].endswith(" (50):") and len(lines) == 10
    assert lines[5] == "- family 0: not needed: stage 2 fits" and lines[-1] == "- and 46 more (--json lists all)"


def test_what_is_written_is_the_best(found: tuple[Path, dict[str, Any]]) -> None:
    folder, answer = found
    best = answer["best"][0]
    assert json.loads((folder / "ds.json").read_text()) == best["config"]
    assert best["config"]["zero_optimization"]["stage3_prefetch_bucket_size"] == "auto"  # a run fills it from its own arguments
    assert best["config"]["zero_optimization"]["stage"] in (1, 2, 3)  # stage 0 takes more
    assert best["peak_bytes_per_rank"]["host"] <= 550_000
    launched = config_args.load_config_from_file(str(folder / "accelerate.yaml"))
    assert launched.num_processes == 2 and launched.deepspeed_config == {
        "deepspeed_config_file": str(folder / "ds.json"),
        "zero3_init_flag": best["config"]["zero_optimization"]["stage"] == 3,
    }


@PARALLELISM_CONFIG
def test_what_the_script_must_switch_on_is_said(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3}, "sequence_parallel_size": 2}
    _, said = write(tmp_path / "slices", config, Cluster(4, 4), 2, True)
    assert "recomputes the activations of 1 in 2 blocks, with those of the others on the host" in said
    assert 'gradient_checkpointing_kwargs={"every_n_layers": 2}' in said and "save_on_cpu()" in said
    launched = config_args.load_config_from_file(str(tmp_path / "slices" / "accelerate.yaml"))
    assert launched.parallelism_config == {"parallelism_config_sp_size": 2}  # without it accelerate cuts no batches
    assert len(write(tmp_path / "both", {**config, "hf_zero": {"context_parallel_size": 2}}, Cluster(4, 4), 0)) == 1
    assert not config_args.load_config_from_file(str(tmp_path / "both" / "accelerate.yaml")).parallelism_config  # the engine cuts them


@pytest.mark.slow
def test_what_is_written_trains(model: Path, found: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, answer = found
    script = ["--model", str(model), "--output", str(tmp_path), "--optimizer", "code", "--scheduler", "code"]
    report = report_of(launch_on_ranks(folder / "accelerate.yaml", Path(accelerate_loop.__file__), *script))
    losses = report["run"]["losses"]
    assert sum(losses[-4:]) < sum(losses[:4])
    assert report["facts"]["config"]["zero_optimization"]["stage"] == answer["best"][0]["config"]["zero_optimization"]["stage"]


@pytest.mark.slow
def test_two_ranks_of_this_machine_are_measured() -> None:
    found = measure({}, 2, on_host=True)
    assert set(found) == {"tflops", "memory", "operation", "latency", "node-link"}
    assert min(found.values()) > 0


def test_files_of_another_run_stay(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    for call in (places, partial(write_files, config={}, launcher={})):
        with pytest.raises(ConfigError, match="^/.*exists already; name another folder"):
            call(tmp_path)
    assert (tmp_path / "ds.json").read_text() == "{}" and not (tmp_path / "accelerate.yaml").exists()


FIT = ["--fit", "--global-batch", "8", "--memory", "1GB"]
WRONG: list[tuple[list[str], list[str]]] = [
    (["--fit", "--memory", "1GB"], ["--global-batch"]),
    ([*FIT, "--offload-activations"], ["--fit chooses --offload-activations"]),
    (["--fit", "--global-batch", "8"], ["--memory"]),
    ([*FIT, "--global-batch", "7", "--ranks", "2", "--axes", "none"], ["--global-batch 7", "2 data-parallel"]),
    ([*FIT, "--axes", "pipelines"], ["--axes", "pipelines", "tensor"]),
    ([*FIT, "--axes", "experts"], ["--axes", "no experts"]),
    ([*FIT, "--rate", "ram=1Gbit"], ["--rate", "ram", "host-memory"]),
    ([*FIT, "--rate", "memory=1GB"], ["--rate memory", "1GB", "400Gbit"]),
    ([*FIT, "--minutes", "0"], ["--minutes is 0", "above 0"]),
    (["--minutes", "3", "--config", "{}"], ["--minutes", "--fit"]),
    ([*FIT, "--measure"], ["--measure", "--device cpu"]),
    ([*FIT, "--plot", "x.png"], ["--plot", "--write"]),
    (["--write", "x", "--config", "{}"], ["--write", "--fit"]),
    ([], ["--config", "--fit"]),
]


@pytest.mark.parametrize("index", range(len(WRONG)))
def test_wrong_input_is_status_two(capsys: pytest.CaptureFixture[str], index: int) -> None:
    line, words = WRONG[index]
    status = main(["plan", "llama", "--set", "num_hidden_layers=1", *line])
    lines = [text for text in capsys.readouterr().err.splitlines() if text.startswith("hf-zero plan:")]
    assert status == 2 and len(lines) == 1
    for word in words:
        assert word in lines[0]


@pytest.mark.quick
def test_what_a_rank_holds_of_a_dimension_is_known_without_values() -> None:
    with FakeTensorMode():
        dim = SymbolicDim(4096)
        assert ranges_of(indices(dim, {dim.find(): (1, 2)})) == [(2048, 4096)]


@pytest.mark.quick
def test_the_bar_moves_with_every_plan_and_never_back() -> None:
    seen: list[tuple[str, float]] = []
    bar = progress.SearchBar(lambda text, done: seen.append((text, done or 0.0)))
    for number in range(5):
        bar.begin(f"part {number}", number / 5, (number + 1) / 5)
        for _ in range(10):
            bar.advance()
    shares = [done for _, done in seen]
    assert shares == sorted(shares) and len(set(shares)) > 50 and shares[-1] <= 1
    assert seen[0][0] == "part 0" and seen[-1][0] == "part 4, 50 plans"
    bar.begin("part 3", 0.6, 0.8)  # a family that is due again
    assert seen[-1][1] == shares[-1]


@pytest.mark.quick
def test_where_no_bar_is_shown_lines_tell_of_the_search(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.01)

    def has_printed(text: str) -> bool:
        said.append(capsys.readouterr().err)
        return text in "".join(said)

    said: list[str] = []
    with progress.shown("hf-zero plan --fit", "the first plan") as show:
        bar = progress.SearchBar(show)
        until(lambda: has_printed(" s: the first plan\n"), "a line before the first plan ends")
        bar.begin("stage 2", 0.0, 0.5)
        bar.advance()
        until(lambda: has_printed(" s: stage 2, 1 plans\n"), "a line after it")
    assert re.match(r"hf-zero plan --fit, \d+ s: the first plan\n", "".join(said))


@pytest.mark.quick
def test_a_plan_that_ends_is_told() -> None:
    class Short(Task):
        def costs(self) -> HfZeroError:
            return HfZeroError("refused")

    ended: list[int] = []
    workers = Workers(ended=lambda: ended.append(1))
    wish = ModelWish("llama", {})
    assert len(workers.costs([Short(wish, {}, Cluster(1, 1), Load(1, 1))] * 3)) == len(ended) == 3
