"""The flops profiler: counts equal to torch's own counter and to formulae, by module, and at every stage the same."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hf_zero.deepspeed
from hf_zero.errors import ConfigError, StateError
from hf_zero.profiling.costs import COUNTED, CostRecorder, OperationCounter
from hf_zero.profiling.flops_profiler import FlopsProfiler, get_model_profile
from hf_zero.profiling.report import duration_to_string, flops_to_string, macs_to_string, number_to_string, params_to_string
from tests.support import ranks
from tests.support.logged import messages_of_log
from tests.support.models import CASES

hf_zero.deepspeed.install_as_deepspeed()  # before other libraries look whether there is one

ROWS, WIDTHS = 3, (8, 16, 4)
STACK_FLOPS = sum(2 * ROWS * before * after for before, after in zip(WIDTHS, WIDTHS[1:], strict=False))


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


class Attention(nn.Module):
    """Self-attention written out, so that every product of matrices is known."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.take = nn.Linear(width, 3 * width)
        self.give = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.take(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        return self.give(mixed.transpose(1, 2).reshape(batch, length, width))


def counted_by_torch(run: Any) -> int:
    """By torch's own counter, with CPU attention through the products of matrices that it knows."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_a_stack_of_linear_layers_by_formula() -> None:
    flops, macs, params = get_model_profile(stack(), input_shape=(ROWS, 8), print_profile=False, as_string=False)
    assert (flops, macs, params) == (STACK_FLOPS, STACK_FLOPS // 2, 8 * 16 + 16 + 16 * 4 + 4)


def test_attention_by_formula() -> None:
    batch, length, width, heads = 2, 6, 16, 4
    model = Attention(width, heads)
    flops, _, _ = get_model_profile(model, input_shape=(batch, length, width), print_profile=False, as_string=False)
    projections = 2 * batch * length * width * 4 * width
    assert flops == projections + 2 * (2 * batch * length * length * width)


def test_fused_attention_counts_like_its_products() -> None:
    """On CPUs too; in backward the fused kernel computes the scores once more."""
    shape, width = (2, 4, 6, 8), 8
    scores = 2 * 2 * 4 * 6 * 6 * width
    counts = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
        forward, backward = OperationCounter(), OperationCounter()
        with sdpa_kernel(backend):
            with forward:
                mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            with backward:
                mixed.sum().backward()
        counts.append((forward.total, backward.total))
    assert counts == [(2 * scores, 4 * scores), (2 * scores, 5 * scores)]


def test_recurrent_layers_in_one_kernel_count_their_products() -> None:
    """Both directions of two layers; on machines with oneDNN a backward has the products of gradients of matrices and of inputs."""
    batch, length, width = 3, 5, 8
    model = nn.LSTM(width, width, num_layers=2, bidirectional=True, batch_first=True)
    products = sum(2 * batch * length * 4 * width * (inputs + width) for inputs in (width, width, 2 * width, 2 * width))
    flops, _, _ = get_model_profile(model, input_shape=(batch, length, width), print_profile=False, as_string=False)
    assert flops == products
    forward, backward = OperationCounter(), OperationCounter()
    with forward:
        result, _ = model(torch.randn(batch, length, width, requires_grad=True))
    with backward:
        result.sum().backward()
    assert forward.total == products
    assert backward.total == 2 * products or not torch.backends.mkldnn.is_available()


def test_cudnns_formula_reads_the_matrices_of_a_list() -> None:
    weights = [torch.empty(16, 8), torch.empty(16, 4), torch.empty(16), torch.empty(16)]
    count = COUNTED[torch.ops.aten._cudnn_rnn]
    assert count(torch.empty(5, 3, 8), weights, 4, None, torch.empty(1, 3, 4), out_val=None) == 2 * 15 * 16 * (8 + 4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padded", [False, True])
def test_the_fast_path_of_torchs_encoder_is_counted_like_its_products(padded: bool) -> None:
    batch, length, width, inner = 2, 6, 16, 32
    layer = nn.TransformerEncoderLayer(width, 4, inner, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True).eval()
    mask = torch.zeros(batch, length, dtype=torch.bool)
    mask[1, -1] = True
    counter, inputs = OperationCounter(), torch.randn(batch, length, width)
    with torch.no_grad(), counter:
        found = model(inputs, src_key_padding_mask=mask if padded else None)
    assert counter.total == 2 * batch * length * width * (4 * width + 2 * inner) + 4 * batch * length * length * width
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        wanted = model(inputs, src_key_padding_mask=mask if padded else None)
    assert torch.allclose(found[~mask], wanted[~mask], atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "t5", "albert", "mixtral", "vit"])
def test_forward_and_backward_equal_torchs_counter(name: str) -> None:
    case = CASES[name]
    model, batch = case.build(), case.rows(1)
    wanted = [counted_by_torch(lambda: case.forward(model, batch)), 0]
    with sdpa_kernel(SDPBackend.MATH):
        loss = case.forward(model, batch)
    wanted[1] = counted_by_torch(loss.backward)
    recorder, backward = CostRecorder(model), OperationCounter()
    with sdpa_kernel(SDPBackend.MATH):
        recorder.start()
        loss = case.forward(model, batch)
        recorder.stop()
        with backward:
            loss.backward()
    assert [recorder.total.flops, backward.total] == wanted and min(wanted) > 0


def test_modules_add_up_to_the_model() -> None:
    model = stack()
    recorder = CostRecorder(model)
    recorder.start()
    for _ in range(2):
        model(torch.ones(ROWS, 8))
    recorder.stop()
    tree = recorder.tree()
    assert [(node.name, node.kind, node.cost.calls, node.cost.flops) for node in tree.children] == [
        ("0", "Linear", 2, 4 * ROWS * 8 * 16),
        ("1", "ReLU", 2, 0),
        ("2", "Linear", 2, 4 * ROWS * 16 * 4),
    ]
    assert tree.cost.flops == recorder.total.flops == 2 * STACK_FLOPS and tree.params == sum(node.params for node in tree.children)
    assert tree.cost.seconds >= sum(node.cost.seconds for node in tree.children) > 0
    assert not model._forward_hooks and not model[0]._forward_pre_hooks


def test_ignored_modules_count_for_nobody() -> None:
    class Ignored(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(Ignored(16, 16), nn.Linear(16, 4)))
    flops, _, _ = get_model_profile(model, input_shape=(ROWS, 8), print_profile=False, as_string=False, ignore_modules=[Ignored])
    assert flops == STACK_FLOPS


def test_what_backward_computes_again_is_no_forward() -> None:
    inner = stack()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Checkpointed()
    profiler, backward = FlopsProfiler(model), OperationCounter()
    profiler.start_profile()
    with backward:
        loss = model(torch.ones(ROWS, 8, requires_grad=True)).sum()
        before = backward.total
        loss.backward()
    profiler.stop_profile()
    assert before == profiler.get_total_flops() == profiler.flops == STACK_FLOPS, (
        "recomputation ran inside start and stop and was not added"
    )
    again = STACK_FLOPS - 2 * ROWS * 16 * 4  # recomputation stops before the last layer, whose output nothing needs
    assert backward.total == 3 * STACK_FLOPS + again
    assert profiler.tree().children[0].cost.calls == 1


@pytest.mark.parametrize(("left", "right"), [((8,), (8,)), ((4, 8), (8,)), ((8,), (8, 5)), ((3, 4, 8), (8,))])
def test_products_with_vectors_count_too(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """torch's own counter takes them for nothing."""
    with OperationCounter() as counter:
        result = torch.ones(left) @ torch.ones(right)
    assert counter.total == 2 * 8 * result.numel()
    with OperationCounter() as counter:
        nn.Linear(8, 5)(torch.ones(8))
    assert counter.total == 2 * 8 * 5


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    model = stack()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with pytest.raises(RuntimeError):
        model(torch.ones(ROWS, 7))
    model(torch.ones(ROWS, 8))
    profiler.stop_profile()
    assert profiler.get_total_flops() == STACK_FLOPS
    assert profiler.tree().children[0].cost.flops == 2 * ROWS * 8 * 16
    profiler.end_profile()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_api_under_deepspeeds_names(capsys: pytest.CaptureFixture[str]) -> None:
    package = importlib.import_module("deepspeed.profiling.flops_profiler")
    module = importlib.import_module("deepspeed.profiling.flops_profiler.profiler")
    assert package.FlopsProfiler is module.FlopsProfiler is FlopsProfiler and package.get_model_profile is get_model_profile
    model = stack()
    profiler = package.FlopsProfiler(model)
    with pytest.raises(StateError, match="start_profile"):
        profiler.get_total_flops()
    profiler.start_profile()
    model(torch.ones(ROWS, 8))
    profiler.stop_profile()
    assert profiler.get_total_flops(as_string=True) == "1.15 KFLOPs" and profiler.get_total_macs() == STACK_FLOPS // 2
    assert profiler.get_total_params() == 212 and 0 < profiler.get_total_duration() < 60
    assert profiler.get_total_duration(as_string=True).endswith("s")
    profiler.print_model_profile(profile_step=5, module_depth=0, top_modules=2)
    text = capsys.readouterr().out
    assert "step 5" in text and "depth 0" in text and "depth 1" not in text and "(0) Linear" not in text
    profiler.print_model_aggregated_profile(top_modules=1)
    text = capsys.readouterr().out
    counted = re.findall(r"^    (?:parameters|MACs) +(.+)$", text.partition("depth 1:")[2], re.MULTILINE)
    assert counted == ["Linear 212", "Linear 576 MACs"]  # of time, which is whose it happens to be, there is one name too
    profiler.reset_profile()
    assert profiler.get_total_flops() == 0
    profiler.end_profile()


def test_report_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = stack().train()
    model[1].eval()
    answer = get_model_profile(model, args=[torch.ones(ROWS, 8)], output_file=str(tmp_path / "profile.txt"))
    assert answer == ("1.15 KFLOPs", "576 MACs", "212") and not capsys.readouterr().out
    assert [module.training for module in model] == [True, False, True] and model.training
    text = (tmp_path / "profile.txt").read_text()
    assert "(2) Linear  68 (32.1 %), 192 MACs (33.3 %)" in text and "forward operations" in text


def test_generate_and_bad_arguments() -> None:
    case = CASES["gpt2"]
    model = case.build()
    tokens = case.rows(1)["input_ids"]
    kwargs = {"input_ids": tokens, "max_new_tokens": 3, "do_sample": False, "use_cache": False, "pad_token_id": 0, "eos_token_id": None}
    model.eval()
    with torch.no_grad():
        wanted = counted_by_torch(lambda: model.generate(**kwargs))
    assert get_model_profile(model, kwargs=kwargs, mode="generate", print_profile=False, as_string=False)[0] == wanted > 0
    with pytest.raises(ConfigError, match="input_shape"):
        get_model_profile(model)
    with pytest.raises(ConfigError, match="mode='train'"):
        get_model_profile(model, kwargs=kwargs, mode="train")


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (number_to_string(0), "0 "),
        (flops_to_string(43.5e9), "43.5 GFLOPs"),
        (flops_to_string(5e9, "MFLOPS"), "5000 MFLOPs"),
        (macs_to_string(21.749e9), "21.75 GMACs"),
        (params_to_string(1.557e9), "1.56 B"),
        (params_to_string(124439808), "124.44 M"),
        (duration_to_string(0.00345), "3.45 ms"),
        (duration_to_string(75.0), "75 s"),
        (duration_to_string(5e-7), "0.5 us"),
        (duration_to_string(0.25, "s"), "0.25 s"),
    ],
)
def test_units(shown: str, wanted: str) -> None:
    assert shown == wanted


def _profile_of_an_engine(stage: int, section: dict[str, Any] | None) -> tuple[list[float], str, Any]:
    """Losses of three steps of two micro-steps with an evaluation in each, what was printed, and what the engine tells of the profile."""
    import io
    from contextlib import redirect_stdout

    import hf_zero

    case = CASES["gpt2"]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
        **({"flops_profiler": section} if section else {}),
    }
    engine, *_ = hf_zero.initialize(model=case.build(), config=config)
    losses, rank, printed = [], torch.distributed.get_rank(), io.StringIO()
    with redirect_stdout(printed), sdpa_kernel(SDPBackend.MATH):
        for step in range(3):
            for micro in range(2):
                batch = case.rows(step, micro, rank)
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                losses.append(float(loss))
                engine.eval()
                with torch.no_grad():
                    engine(**batch)
                engine.train()
    profiler = engine.flops_profiler
    numbers = (profiler.get_total_flops(), profiler.get_total_params()) if section and rank == 0 else None
    return losses, printed.getvalue(), (numbers, engine.wall_clock_breakdown(), engine.flops_profiler_profile_step())


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_profile_of_a_training_step(stage: int) -> None:
    case = CASES["gpt2"]
    model = case.build()
    batches = [case.rows(1, micro, 0) for micro in range(2)]
    forward = sum(counted_by_torch(lambda batch=batch: case.forward(model, batch)) for batch in batches)
    with sdpa_kernel(SDPBackend.MATH):
        backward = sum(counted_by_torch(case.forward(model, batch).backward) for batch in batches)
    params = sum(param.numel() for param in model.parameters())

    section = {"enabled": True, "profile_step": 1, "module_depth": 2, "recompute_fwd_factor": 0.5}
    plain = ranks.run_ranks(_profile_of_an_engine, 2, stage, None)
    profiled = ranks.run_ranks(_profile_of_an_engine, 2, stage, section)
    assert [answer[0] for answer in profiled] == [answer[0] for answer in plain], "profiling changes nothing"
    assert plain[0][1] == plain[1][1] == profiled[1][1] == "" and plain[0][2] == (None, False, 1)
    text, told = profiled[0][1], profiled[0][2]
    assert told == ((forward, params), True, 1)
    assert text.count("optimizer step 1 (counted from 0), rank 0 of 2") == 1, "printed once"
    for line in (
        f"forward operations per rank                 {flops_to_string(forward)}",
        f"backward operations per rank                {flops_to_string(backward)}",
        f"of these recomputed (recompute_fwd_factor)  {flops_to_string(forward / 2)}",
        "micro-steps                                 2",
        "samples of all ranks in the step            8",
        f"parameters of the model                     {params_to_string(params)}",
    ):
        assert line in text, text
    assert "(transformer) GPT2Model" in text and "(h) ModuleList" in text and "(0) GPT2Block" not in text


@pytest.mark.slow  # fast: `test_profile_of_a_training_step`
def test_profile_goes_to_a_file_and_eval_engines_have_none(tmp_path: Path) -> None:
    path = tmp_path / "flops.txt"
    answers = ranks.run_ranks(_profile_of_an_engine, 1, 2, {"enabled": "true", "profile_step": 0, "output_file": str(path)})
    assert answers[0][1] == "" and "optimizer step 0" in path.read_text()
    assert "deepspeed" not in sys.modules or hasattr(sys.modules["deepspeed"], "profiling")


def _profile_in_eval_mode(path: str, calls_engine: bool) -> tuple[list[str], str]:
    """Lines that rank 0 logs in two steps of a model in eval mode, of which the second is profiled, and the report in ``path``."""
    import hf_zero

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": path},
    }
    engine, *_ = hf_zero.initialize(model=nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)).eval(), config=config)
    with messages_of_log() as lines:
        for step in range(3):
            with torch.no_grad():
                engine(torch.ones(2, 8))  # of an evaluation
            forward = engine if calls_engine or step != 1 else engine.module
            engine.backward(forward(torch.ones(2, 8)).sum())
            engine.step()
    assert not engine.module.training
    return [line for line in lines if "flops_profiler" in line], Path(path).read_text() if Path(path).exists() else ""


def test_a_model_in_eval_mode_that_trains_is_profiled(tmp_path: Path) -> None:
    lines, text = ranks.run_ranks(_profile_in_eval_mode, 1, str(tmp_path / "flops.txt"), True)[0]
    assert not lines and "optimizer step 1" in text
    assert re.search(r"micro-steps +1\n", text) and f"forward operations per rank                 {flops_to_string(2 * 2 * 40)}" in text
    lines, text = ranks.run_ranks(_profile_in_eval_mode, 1, str(tmp_path / "none.txt"), False)[0]
    assert not text and len(lines) == 1 and "optimizer step 1 (counted from 0) had no forward of the engine" in lines[0]
