"""Saving a sharded model with the calls of plain PyTorch: a file that loads, or an error that says how; never empty tensors."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from tests.support import ranks, trainers
from tests.support.models import CASES
from tests.support.parity import Run, initialize
from tests.support.versions import TRANSFORMERS_5

WRITERS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "torch.save": lambda model, file: torch.save(model.state_dict(), file),
    "torch.save after cpu()": lambda model, file: torch.save({key: value.cpu() for key, value in model.state_dict().items()}, file),
    "torch.save of a copy": lambda model, file: torch.save(copy.deepcopy(model.state_dict()), file),
    "torch.save of parameters": lambda model, file: torch.save(model.state_dict(keep_vars=True), file),
    "torch.save of a part": lambda model, file: torch.save(model.get_submodule("transformer.h.0").state_dict(), file),
    "pickle": lambda model, file: file.write_bytes(pickle.dumps(model.state_dict())),
    "safetensors.save_file": lambda model, file: save_file(model.state_dict(), file),
    "safetensors.save_model": lambda model, file: save_model(model, str(file)),
    "numpy": lambda model, file: model.state_dict()["transformer.wpe.weight"].numpy().tofile(file),
}


LOADS_NOT = (
    "torch.save",
    "torch.save after cpu()",
    "torch.save of a copy",
    "torch.save of a part",
    "pickle",
)  # succeed, and their files cannot be loaded


def _refused_everywhere(folder: Path) -> None:
    from hf_zero.errors import StateError
    from hf_zero.zero import GatheredParameters

    engine = initialize(CASES["gpt2"].build(), Run(3))
    model = engine.module
    file = folder / f"rank{ranks.rank()}"
    for name, write in WRITERS.items():
        file.unlink(missing_ok=True)
        if name in LOADS_NOT:
            write(model, file)
            with pytest.raises(StateError, match=r"weight, torch.float32 of shape .* has no values in this file"):
                pickle.loads(file.read_bytes()) if name == "pickle" else torch.load(file, weights_only=False)
            with GatheredParameters(list(model.parameters())):
                write(model, file)
            continue
        with pytest.raises(StateError, match="GatheredParameters") as caught:
            write(model, file)
        assert str(caught.value).startswith("parameter ") and ("transformer." in str(caught.value)) == (name != "torch.save of a part"), (
            name
        )
        assert not file.exists() or not file.stat().st_size or name.startswith("torch.save"), name
        with GatheredParameters(list(model.parameters())):
            if not name.startswith("safetensors"):  # which refuses tied weights itself
                write(model, file)
    assert engine(**CASES["gpt2"].rows(0, 0, ranks.rank())).loss.isfinite()


def test_writing_a_released_model_is_an_error(tmp_path: Path) -> None:
    ranks.run_ranks(_refused_everywhere, 2, tmp_path)


def _saves_of_one_rank(folder: Path) -> None:
    """The end of DeepSpeed-Chat: rank 0 saves a state dict alone, then all ranks gather, and rank 0 writes over the file."""
    from hf_zero.errors import StateError
    from hf_zero.zero import GatheredParameters

    case, file = CASES["gpt2"], folder / "pytorch_model.bin"
    engine = initialize(case.build(), Run(3))

    def step(number: int) -> None:
        engine.backward(engine(**case.rows(number, 0, ranks.rank())).loss)
        engine.step()

    step(0)
    if ranks.rank() == 0:
        torch.save(engine.module.state_dict(), file)
    gathered = {}
    for name, param in engine.module.named_parameters():
        with GatheredParameters([param] if param.ds_status.name == "NOT_AVAILABLE" else []):
            gathered[name] = param.data.cpu()
    if ranks.rank() == 0:
        torch.save(gathered, file)
        assert all(value.numel() for value in torch.load(file).values())
    step(1)
    if ranks.rank() == 0:
        torch.save(engine.module.state_dict(), file)
    with pytest.raises(StateError, match=r"a state dict without values was saved, .* \(rank 0\)"):
        step(2)


def test_a_state_dict_that_one_rank_saves(tmp_path: Path) -> None:
    ranks.run_ranks(_saves_of_one_rank, 2, tmp_path)


def _saves_of_an_average(folder: Path) -> None:
    """The end of DeepSpeed-Chat with an average of the weights, whose engine does not train."""
    import hf_zero
    from hf_zero.errors import StateError
    from hf_zero.zero import GatheredParameters

    case, file = CASES["gpt2"], folder / "pytorch_model.bin"
    engine = initialize(case.build(), Run(3))
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    average, *_ = hf_zero.initialize(model=case.build(), config=settings)

    def step(number: int) -> None:
        engine.backward(engine(**case.rows(number, 0, ranks.rank())).loss)
        engine.step()

    if ranks.rank() == 0:
        torch.save(average.module.state_dict(), file)
        with pytest.raises(StateError, match="has no values in this file"):
            torch.load(file, weights_only=False)
    gathered = {}
    for name, param in average.module.named_parameters():
        with GatheredParameters([param] if param.ds_status.name == "NOT_AVAILABLE" else []):
            gathered[name] = param.data.cpu()
    step(0)
    if ranks.rank() == 0:
        torch.save(gathered, file)
        loaded = torch.load(file)
        assert all(torch.equal(value, loaded[name]) for name, value in case.build().named_parameters())
        torch.save(average.module.state_dict(), file)
    with pytest.raises(StateError, match=r"a state dict without values was saved, .* \(rank 0\)"):
        step(1)
    step(2)


def test_a_state_dict_of_a_model_that_does_not_train(tmp_path: Path) -> None:
    ranks.run_ranks(_saves_of_an_average, 2, tmp_path)


def _before_the_engine() -> None:
    import hf_zero
    from hf_zero.errors import StateError

    with hf_zero.zero.Init():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for write in (pickle.dumps, lambda value: torch.save(value, "/dev/null")):
        with pytest.raises(StateError, match="is divided over the ranks"):
            write(model.state_dict())
        with pytest.raises(StateError, match="is divided over the ranks"):
            write(model)
    with hf_zero.zero.GatheredParameters(list(model.parameters())):
        copied = copy.deepcopy(model)
    assert all(value.numel() for value in copied.state_dict().values())
    pickle.dumps(copied.state_dict())


def test_models_under_construction_are_guarded_too() -> None:
    ranks.run_ranks(_before_the_engine, 2)


class _InPlaceOfLinear(nn.Linear):
    """A layer that takes the hooks and parameters of the layer whose place it takes, as those of the library adapters."""

    @staticmethod
    def of(layer: nn.Linear) -> _InPlaceOfLinear:
        made = _InPlaceOfLinear(layer.in_features, layer.out_features, device="meta")
        made.weight, made.bias = layer.weight, layer.bias
        for name, value in vars(layer).items():
            if "_hooks" in name:
                setattr(made, name, value)
        return made


def _replaced_layers() -> None:
    import hf_zero
    from hf_zero.errors import StateError

    with hf_zero.zero.Init():
        model = nn.Sequential(nn.Linear(4, 4))
    model[0] = _InPlaceOfLinear.of(model[0])
    gc.collect()  # the first layer is garbage
    state = model.state_dict()
    assert model.load_state_dict(state).missing_keys == []
    with pytest.raises(StateError, match=r"parameter 0.weight is divided over the ranks now"):
        model.load_state_dict({name: torch.zeros(value.shape) for name, value in state.items()})
    with hf_zero.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        model.load_state_dict({name: torch.ones(value.shape) for name, value in state.items()})
    with hf_zero.zero.GatheredParameters(list(model.parameters())):
        copied = copy.deepcopy(model)
        assert all(bool((value == 1).all()) for value in model.state_dict().values())
    copied.load_state_dict({name: torch.zeros(value.shape) for name, value in state.items()})
    assert not any(bool(value.any()) for value in copied.state_dict().values())


def test_a_layer_takes_the_hooks_of_another_one() -> None:
    ranks.run_ranks(_replaced_layers, 2)


def _readers() -> None:
    """What scripts do with a state dict besides writing it."""
    from hf_zero.errors import StateError

    engine = initialize(CASES["gpt2"].build(), Run(3))
    model = engine.module
    before = trainers.weights_of(model)
    state = model.state_dict()
    assert state.keys() == model.state_dict(keep_vars=True).keys() == copy.deepcopy(state).keys()
    assert {name: value.shape for name, value in state.items() if name in before} == {name: value.shape for name, value in before.items()}
    assert {(value.dtype, value.device.type) for value in state.values()} == {(torch.float32, "cpu")}
    assert model.load_state_dict(state).missing_keys == []
    with pytest.raises(StateError, match="a state dict without its values was loaded"):  # copies would have kept other values
        model.load_state_dict({name: value.clone().half() for name, value in state.items()})
    found = trainers.weights_of(model)
    assert all(torch.equal(value, found[name]) for name, value in before.items())
    joined = torch.cat(torch.chunk(state["transformer.wpe.weight"].transpose(0, 1).contiguous(), 2)).bfloat16()
    assert joined.shape == before["transformer.wpe.weight"].T.shape and joined.dtype == torch.bfloat16
    assert "transformer.wpe.weight" in repr(state)
    for read in (
        lambda value: value.tolist(),
        lambda value: torch.equal(value, value.clone()),
        lambda value: float(value.sum()),
        lambda value: torch.zeros(value.shape).copy_(value),
    ):
        with pytest.raises(StateError, match="transformer.wpe.weight"):
            read(state["transformer.wpe.weight"])
    check_left_out()


class LeavesOut(nn.Module):
    """A model whose own state dict has some of it, under other names, as trl's models with a value head."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x)).sum()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"v_{name}": value for name, value in self.head.state_dict(*args, **kwargs).items()}


def check_left_out() -> None:
    """What is gathered has all parameters: those that the model's own dict leaves out under their names in the module."""
    engine = initialize(LeavesOut(), Run(3))
    state = engine._consolidated_16bit_state_dict()
    engine.destroy()
    if ranks.rank() == 0:
        assert {name: tuple(value.shape) for name, value in state.items()} == {
            "v_weight": (1, 4), "v_bias": (1,), "inner.weight": (4, 4), "inner.bias": (4,)
        }  # fmt: skip


def test_reading_names_and_types_works() -> None:
    ranks.run_ranks(_readers, 2)


# -- save_pretrained -----------------------------------------------------------------------------------------------------------


def _save_pretrained(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """accelerate's idiom, where ranks that do not write have no weights; the plain call is an error on every rank."""
    from accelerate import Accelerator

    from hf_zero.integrations import ZeroPlugin

    with trainers.clean_state():
        accelerator = Accelerator(deepspeed_plugin=ZeroPlugin(trainers.zero_config(3)))
        model = _model(kind)
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = 1
        engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        unwrapped = accelerator.unwrap_model(engine)
        text = _plain_call(unwrapped, folder / f"plain{ranks.rank()}")
        assert text.startswith("parameter") and "accelerator.get_state_dict" in text or ranks.rank() and not text, text
        assert not list((folder / f"plain{ranks.rank()}").glob("*.safetensors"))
        options = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
        unwrapped.save_pretrained(folder / "final", **options, state_dict=accelerator.get_state_dict(engine))
        unwrapped.save_pretrained(folder / "no_values", is_main_process=False)
        check_held(accelerator, engine, unwrapped, folder)
        from hf_zero.zero import GatheredParameters

        with GatheredParameters(list(unwrapped.parameters())):
            unwrapped.save_pretrained(folder / "gathered", **options)
            copy.deepcopy(unwrapped).save_pretrained(folder / "copied", **options)
        torch.distributed.barrier()
        return trainers.weights_of(unwrapped)


def check_held(accelerator: Any, engine: Any, unwrapped: Any, folder: Path) -> None:
    """A save that is given nothing takes what was gathered last, as long as the script holds it and no step has changed the weights.

    Under transformers 4 all ranks would write, and rank 1 sees no gathered state.
    """
    state = accelerator.get_state_dict(engine)
    unwrapped.save_pretrained(folder / "held")
    assert state is None or list((folder / "held").glob("*.safetensors"))
    progress = engine.progress
    progress.global_steps += 1
    assert ("divided over the ranks" in _plain_call(unwrapped, folder / f"older{ranks.rank()}")) == (
        ranks.rank() == 0 or _is_peft(unwrapped) or not TRANSFORMERS_5
    )
    progress.global_steps -= 1
    del state
    gc.collect()
    assert ("divided over the ranks" in _plain_call(unwrapped, folder / f"gone{ranks.rank()}")) == (ranks.rank() == 0)


def _is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config")


def _plain_call(model: Any, folder: Path) -> str:
    """The error of ``save_pretrained(folder)`` on every rank; transformers 5 writes on rank 0 only, whatever the others ask for."""
    from hf_zero.errors import StateError

    try:
        model.save_pretrained(folder)
    except StateError as error:
        return str(error)
    return ""


def _model(kind: str) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    if kind == "mixtral":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        return MixtralForCausalLM(MixtralConfig(vocab_size=64, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, **sizes))
    model = CASES["llama" if kind == "lora" else kind].build()
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model


@pytest.mark.fast_rows("gpt2", "lora")
@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "lora"])
def test_save_pretrained(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    if kind == "lora":
        pytest.importorskip("peft")
    weights = ranks.run_ranks(_save_pretrained, 2, tmp_path, kind)[0]
    for folder in (tmp_path / name for name in ("final", "held", "gathered", "copied")):
        if kind == "lora":
            found = {
                name.replace("_A", "_A.default").replace("_B", "_B.default"): v
                for name, v in load_file(folder / "adapter_model.safetensors").items()
            }
            assert len(found) == 8 and all(torch.equal(value, weights[name]) for name, value in found.items())
        else:
            found = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
            assert found.keys() == weights.keys() and all(torch.equal(value, weights[name]) for name, value in found.items())
