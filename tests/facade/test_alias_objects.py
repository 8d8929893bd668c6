"""The objects behind the alias that are not the engine: processes, device, optimizers, copies, arguments."""

from __future__ import annotations

import argparse
import importlib
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch

from hf_zero.deepspeed.launcher import add_config_arguments
from hf_zero.deepspeed.served import comm, groups
from hf_zero.deepspeed.served.accelerator import get_accelerator
from hf_zero.deepspeed.served.construction import zero_wrapper_for_fp_tensor_constructor
from hf_zero.deepspeed.served.helpers import clone_tensors_for_torch_save
from hf_zero.deepspeed.served.ops import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion, FusedAdam, FusedLion
from hf_zero.errors import StateError, UnsupportedError


def _parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values))


def _steps(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, count: int = 3) -> torch.Tensor:
    for step in range(count):
        parameter.grad = torch.linspace(-1.0, 1.0, parameter.numel()) * (step + 1)
        optimizer.step()
    return parameter.detach().clone()


class TestOptimizers:
    """accelerate builds these classes from the groups of the user's optimizer."""

    @pytest.mark.parametrize(("kind", "adamw_mode"), [(torch.optim.AdamW, True), (torch.optim.Adam, False)])
    def test_cpu_adam_continues_the_users_adam(self, kind: type[torch.optim.Optimizer], adamw_mode: bool) -> None:
        theirs, ours = _parameter(1.0, 2.0, 3.0), _parameter(1.0, 2.0, 3.0)
        options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
        user = kind([ours], **options)
        built = DeepSpeedCPUAdam(user.param_groups, lr=0.1, weight_decay=0.2, adamw_mode=adamw_mode)
        assert built.param_groups[0] is user.param_groups[0] and built.adam_w_mode is adamw_mode
        torch.testing.assert_close(_steps(kind([theirs], **options), theirs), _steps(built, ours), rtol=1e-6, atol=1e-7)

    def test_adamw_mode_decides_over_the_groups_own_flag(self) -> None:
        """accelerate says adamw_mode=False for bitsandbytes' Adam although the groups may carry torch's AdamW flag."""
        ours, theirs = _parameter(1.0, 2.0), _parameter(1.0, 2.0)
        built = DeepSpeedCPUAdam(torch.optim.AdamW([ours], lr=0.1, weight_decay=0.5).param_groups, lr=0.1, adamw_mode=False)
        torch.testing.assert_close(_steps(built, ours), _steps(torch.optim.Adam([theirs], lr=0.1, weight_decay=0.5), theirs))

    def test_fused_adam_takes_deepspeeds_keywords(self) -> None:
        ours, theirs = _parameter(1.0, -1.0), _parameter(1.0, -1.0)
        built = FusedAdam([ours], lr=0.1, adam_w_mode=False, weight_decay=0.1, set_grad_none=True)
        torch.testing.assert_close(_steps(built, ours), _steps(torch.optim.Adam([theirs], lr=0.1, weight_decay=0.1), theirs))

    def test_adagrad_and_lion_bear_the_keyword_accelerate_passes_to_all(self) -> None:
        ours, theirs = _parameter(1.0, 2.0), _parameter(1.0, 2.0)
        built = DeepSpeedCPUAdagrad(torch.optim.Adagrad([ours], lr=0.1).param_groups, lr=0.1, weight_decay=0, adamw_mode=False)
        torch.testing.assert_close(_steps(built, ours), _steps(torch.optim.Adagrad([theirs], lr=0.1), theirs))
        first, second = _parameter(1.0, 2.0), _parameter(1.0, 2.0)
        lion = DeepSpeedCPULion([first], lr=0.1, weight_decay=0.1, adamw_mode=False)
        assert torch.equal(_steps(lion, first), _steps(FusedLion([second], lr=0.1, weight_decay=0.1), second))
        assert torch.allclose(first[1:], torch.tensor([2.0]) * 0.99**3 - 0.1 * (1 + 0.99 + 0.99**2))

    def test_what_is_not_provided_is_refused_by_name(self) -> None:
        with pytest.raises(UnsupportedError, match=r"DeepSpeedCPUAdam\(amsgrad=True\) is not provided"):
            DeepSpeedCPUAdam([_parameter(1.0)], amsgrad=True)
        with pytest.raises(UnsupportedError, match=r"DeepSpeedCPUAdam has no amsgrad"):
            DeepSpeedCPUAdam(torch.optim.AdamW([_parameter(1.0)], amsgrad=True).param_groups)
        with pytest.raises(UnsupportedError, match=r"FusedLion\(set_grad_none=False\) is not provided"):
            FusedLion([_parameter(1.0)], set_grad_none=False)

    def test_moments_of_bf16_parameters_may_be_bf16(self) -> None:
        for fp32_states, dtype in ((True, torch.float32), (False, torch.bfloat16)):
            param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            built = DeepSpeedCPUAdam([param], bias_correction=False, fp32_optimizer_states=fp32_states)
            param.grad = torch.ones_like(param)
            built.step()
            assert built.state[param]["exp_avg"].dtype == dtype

    def test_taking_over_another_optimizer_is_said_aloud(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        from hf_zero import observe

        monkeypatch.setattr(observe, "_warned", set())
        monkeypatch.setattr(observe.logger, "propagate", True)
        DeepSpeedCPUAdam(torch.optim.SGD([_parameter(1.0)], lr=0.1, momentum=0.9).param_groups, lr=0.1)
        assert '"zero_force_ds_cpu_optimizer": false' in caplog.text and "momentum" in caplog.text
        caplog.clear()
        DeepSpeedCPUAdam(torch.optim.AdamW([_parameter(1.0)], lr=0.1).param_groups, lr=0.1)
        assert not caplog.text

    def test_replacing_an_optimizer_with_the_groups_of_adam_is_said_or_refused(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from hf_zero import observe
        from hf_zero.integrations.accumulate import map_optimizer

        def replaced(kind: type[torch.optim.Optimizer]) -> object:
            return map_optimizer(lambda optimizer: DeepSpeedCPUAdam(optimizer.param_groups, lr=0.1), kind([_parameter(1.0)], lr=0.1))

        class Adam_mini(torch.optim.RAdam):  # noqa: N801  # the name of the library
            pass

        monkeypatch.setattr(observe, "_warned", set())
        monkeypatch.setattr(observe.logger, "propagate", True)
        same = type("FusedAdam", (torch.optim.RAdam,), {})
        for kind in (torch.optim.Adam, torch.optim.AdamW, same):
            assert isinstance(replaced(kind), DeepSpeedCPUAdam)
        assert not caplog.text
        assert isinstance(replaced(torch.optim.NAdam), DeepSpeedCPUAdam)
        assert "Adam in the place of NAdam" in caplog.text and '"zero_force_ds_cpu_optimizer": false' in caplog.text
        with pytest.raises(UnsupportedError, match="Adam in the place of Adam_mini.*one second moment per block"):
            replaced(Adam_mini)


class TestBackendForAccelerate:
    """[Note: accelerate without an accelerator], with accelerate's state at the stages of its constructor."""

    @pytest.fixture
    def shared(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
        import sys

        shared: dict[str, object] = {}
        monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(PartialState=SimpleNamespace(_shared_state=shared)))
        return shared

    def test_a_state_under_construction_learns_the_backend(self, shared: dict[str, object]) -> None:
        shared.update({"_cpu": False, "backend": None, "device": None})
        comm._tell_accelerate("gloo")
        assert shared["backend"] == "gloo"

    def test_asking_for_the_group_is_enough(self, shared: dict[str, object]) -> None:
        """A script's own group, or a second state of a process, makes accelerate skip init_distributed."""
        shared.update({"_cpu": False, "backend": None, "device": None})
        assert not comm.is_initialized() and shared["backend"] is None
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            assert comm.is_initialized() and shared["backend"] == "gloo"
        finally:
            torch.distributed.destroy_process_group()

    @pytest.mark.parametrize("state", [{}, {"backend": None, "num_processes": 1}, {"backend": "nccl"}])
    def test_any_other_state_is_left_alone(self, shared: dict[str, object], state: dict[str, object]) -> None:
        shared.update(state)
        comm._tell_accelerate("gloo")
        assert shared == state

    def test_real_accelerate_still_has_the_attributes_we_rely_on(self) -> None:
        source = importlib.import_module("inspect").getsource(importlib.import_module("accelerate.state").PartialState.__init__)
        assert source.index("self.backend = backend") < source.index("dist.init_distributed(") < source.index("self.num_processes =")
        assert "self.__dict__ = self._shared_state" in source


class TestProcesses:
    def test_a_process_without_group_is_rank_zero_of_one(self) -> None:
        assert (comm.get_rank(), comm.get_world_size(), comm.is_initialized(), comm.barrier()) == (0, 1, False, None)
        assert (groups._get_data_parallel_rank(), groups._get_data_parallel_world_size()) == (0, 1)
        with pytest.raises(StateError, match="init_distributed"):
            groups._get_data_parallel_group()

    def test_init_distributed_creates_torchs_default_group(self) -> None:
        comm.init_distributed(verbose=False)
        try:
            assert torch.distributed.get_world_size() == 1 and comm.is_initialized()
            assert groups._get_data_parallel_group() is torch.distributed.group.WORLD
            comm.init_distributed("gloo", auto_mpi_discovery=False)  # a second call finds it
        finally:
            torch.distributed.destroy_process_group()


class TestAccelerator:
    def test_names_are_usable_as_devices(self) -> None:
        accelerator = get_accelerator()
        assert accelerator is get_accelerator()
        assert torch.empty(1, device=accelerator.current_device_name()).device.type == accelerator.device_name()
        assert accelerator.device_name(0) in (accelerator.device_name(), f"{accelerator.device_name()}:0")
        assert accelerator.communication_backend_name() in ("gloo", "nccl", "xccl")

    @pytest.mark.parametrize(("given", "count"), [("4", 4), ("", 1), ("0", 1), ("many", 1)])
    def test_a_cpu_counts_the_ranks_of_the_machine(self, monkeypatch: pytest.MonkeyPatch, given: str, count: int) -> None:
        """DeepSpeed's own tests of two ranks skip themselves where the count is below two."""
        monkeypatch.setenv("LOCAL_SIZE", given)
        if get_accelerator().device_name() == "cpu":
            assert get_accelerator().device_count() == count

    @pytest.mark.parametrize("native", [True, False])
    def test_fp16_is_told_of_the_processor(self, monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
        """Scripts choose a type by it; training in fp16 works either way."""
        if get_accelerator().device_name() == "cpu":
            monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: native, raising=False)
            assert get_accelerator().is_fp16_supported() is native
            assert (torch.float16 in get_accelerator().supported_dtypes()) is native

    def test_memory_and_seeds_are_answered_by_any_device(self) -> None:
        accelerator = get_accelerator()
        accelerator.synchronize()
        accelerator.empty_cache()
        accelerator.reset_peak_memory_stats()
        device = accelerator.current_device_name()
        before = accelerator.memory_allocated()
        block = torch.ones(1 << 28, dtype=torch.uint8, device=device)  # more than the heap keeps of what went
        assert accelerator.memory_allocated() - before >= block.numel() * 0.9
        assert accelerator.max_memory_allocated() >= accelerator.memory_allocated() * 0.9
        assert accelerator.total_memory() > accelerator.available_memory() > 0
        accelerator.manual_seed(3)
        first = torch.rand(2, device=device)
        accelerator.manual_seed(3)
        assert torch.equal(first, torch.rand(2, device=device))


def test_clones_own_exactly_their_elements() -> None:
    Pair = namedtuple("Pair", "left right")
    buffer = torch.arange(100.0)
    nest = OrderedDict(a=buffer[10:12], b=[buffer[:3].requires_grad_(False), 7], c=Pair(buffer.view(10, 10).t(), None))
    copy = clone_tensors_for_torch_save(nest)
    assert type(copy) is OrderedDict and type(copy["c"]) is Pair and copy["b"][1] == 7 and copy["c"].right is None
    for clone, original in ((copy["a"], nest["a"]), (copy["b"][0], nest["b"][0]), (copy["c"].left, nest["c"].left)):
        assert torch.equal(clone, original)
        assert clone.untyped_storage().nbytes() == clone.numel() * 4 and clone.is_contiguous()
        assert clone.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()


def test_clones_of_tied_weights_are_tied() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    copy = clone_tensors_for_torch_save({"embedding": weight, "head": weight.data, "row": weight.data[0], "turned": weight.data.t()})
    assert copy["embedding"] is copy["head"] and torch.equal(copy["head"], weight)
    assert len({copy[name].data_ptr() for name in ("head", "row", "turned")}) == 3
    assert torch.equal(copy["row"], weight[0]) and torch.equal(copy["turned"], weight.t())


def test_constructor_wrapper_sets_device_and_floating_dtype_only() -> None:
    construct = zero_wrapper_for_fp_tensor_constructor(torch.arange, torch.bfloat16, "meta")
    assert construct(3.0).dtype == torch.bfloat16 and construct(3.0).device.type == "meta"
    assert construct(3).dtype == torch.int64
    assert construct(3, device="cpu").device.type == "cpu"


def test_transformers_arange_guard_restores_the_wrapper() -> None:
    """T7: the wrapper is read, replaced and restored as a module global around `zero.Init`."""
    import hf_zero.deepspeed

    hf_zero.deepspeed.install_as_deepspeed()
    from transformers.integrations import deepspeed as integration

    if not hasattr(integration, "prevent_arange_dtype_change"):
        pytest.skip("transformers before 5 has no such guard")
    module = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    with integration.prevent_arange_dtype_change():
        guarded = module.zero_wrapper_for_fp_tensor_constructor
        assert guarded is not zero_wrapper_for_fp_tensor_constructor
        arange = guarded(torch.arange, target_fp_dtype=torch.bfloat16, target_device="cpu")
        empty = guarded(torch.empty, target_fp_dtype=torch.bfloat16, target_device="cpu")
        assert arange(3.0).dtype == torch.float32 and empty(3).dtype == torch.bfloat16
    assert module.zero_wrapper_for_fp_tensor_constructor is zero_wrapper_for_fp_tensor_constructor


def test_script_arguments_are_those_of_deepspeed() -> None:
    parser = argparse.ArgumentParser()
    assert add_config_arguments(parser) is parser
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
    assert (args.deepspeed, args.deepspeed_config) == (True, "x.json")


def test_scripts_ask_for_the_file_operator_and_for_the_kind_of_optimizer() -> None:
    """As transformers' own tests and Lightning's do; a name that stands for nothing here is refused all the same."""
    import hf_zero.deepspeed
    from hf_zero.deepspeed.optimizer import DeepSpeedOptimizer

    hf_zero.deepspeed.install_as_deepspeed()
    aio = importlib.import_module("deepspeed.ops.aio")
    assert importlib.import_module("deepspeed.ops").__compatible_ops__[aio.AsyncIOBuilder.NAME] and aio.AsyncIOBuilder().is_compatible()
    assert importlib.import_module("deepspeed.runtime.zero.stage_1_and_2").DeepSpeedZeroOptimizer is DeepSpeedOptimizer
    assert importlib.import_module("deepspeed.runtime.zero.stage3").DeepSpeedZeroOptimizer_Stage3 is DeepSpeedOptimizer
    with pytest.raises(UnsupportedError, match="not a public interface"):
        _ = aio.aio_handle


def test_lamb_and_muon_under_deepspeeds_names() -> None:
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    lamb = FusedLamb([_parameter(1.0)], lr=0.1, bias_correction=False, eps_inside_sqrt=True, max_coeff=5.0, min_coeff=0.1)
    assert lamb.param_groups[0]["max_coeff"] == 5.0 and lamb.get_lamb_coeffs() == []
    muon = MuonWithAuxAdam([{"params": [torch.nn.Parameter(torch.ones(2, 2))], "use_muon": True}])
    assert (muon.param_groups[0]["lr"], muon.param_groups[0]["momentum"]) == (0.02, 0.95)
