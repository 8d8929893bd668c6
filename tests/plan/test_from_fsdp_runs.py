"""A run of FSDP2 and the run that ``hf-zero plan --from`` makes of its settings, on the same rows: the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_zero.plan import from_fsdp
from hf_zero.plan.fsdp_source import read_source
from tests.plan import fsdp_loop as script
from tests.support import ranks
from tests.support.launches import launch_on_ranks, report_of

EXACT, SIXTEEN_BIT = 1e-6, 1e-2  # FSDP2 is under accelerate's autocast in 16 bit: some operations are fp32 there
# Files of FSDP2, the stage they become, ranks, and how near the losses are.
RUNS: dict[str, tuple[dict[str, Any], int, int, float]] = {
    "resharded": ({"fsdp_reshard_after_forward": True}, 3, 2, EXACT),
    "whole": ({"fsdp_reshard_after_forward": False}, 2, 2, EXACT),
}
SLOW: dict[str, tuple[dict[str, Any], int, int, float]] = {
    "offloaded": ({"fsdp_offload_params": True}, 3, 2, EXACT),
    "bf16": ({"mixed_precision": "bf16"}, 3, 2, SIXTEEN_BIT),
    "bf16_whole": ({"mixed_precision": "bf16", "fsdp_reshard_after_forward": False}, 2, 2, SIXTEEN_BIT),
    "hybrid": ({"dp_replicate_size": 2, "dp_shard_size": 2}, 3, 4, EXACT),
}


def fsdp_file(settings: dict[str, Any], world: int, folder: Path) -> Path:
    """accelerate's YAML with ``settings``, whichever of its blocks they belong to."""
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": settings.get("mixed_precision", "no"),
        "num_machines": 1,
        "num_processes": world,
        "use_cpu": False,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": False,  # needs a device
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            **{name: value for name, value in settings.items() if name.startswith("fsdp_")},
        },
    }
    sizes = {f"parallelism_config_{name}": value for name, value in settings.items() if name.endswith("_size")}
    if sizes:
        content["parallelism_config"] = sizes
    file = folder / "fsdp.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.fast_rows("resharded")
@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_both_files_train_to_the_same_losses(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, stage, world, tolerance = (RUNS | SLOW)[name]
    file = fsdp_file(settings, world, tmp_path)
    from_fsdp.run(str(file), None, None, True, tmp_path / "ours")
    theirs, ours = (
        report_of(launch_on_ranks(launcher, Path(script.__file__), "--accumulation", "2", world=world))
        for launcher in (file, tmp_path / "ours" / "accelerate.yaml")
    )
    assert (theirs["fsdp2"], ours["fsdp2"], ours["stage"]) == (True, False, stage)
    assert theirs["held"] * 2 == theirs["parameters"]  # FSDP2 shards, over two ranks
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=tolerance)
    assert theirs["losses"][0] - theirs["losses"][-1] > 0.2


@pytest.mark.slow  # fast: `test_both_files_train_to_the_same_losses`
def test_a_distributed_config_and_its_counterpart_train_to_the_same_losses(tmp_path: Path) -> None:
    (tmp_path / "distributed.json").write_text('{"fsdp_size": 2}')
    config = from_fsdp.translate(read_source(str(tmp_path / "distributed.json"))).config
    batch = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 0}
    script.small_llama().save_pretrained(tmp_path / "model")
    found = ranks.run_ranks(script.losses_of_distributed_config, 2, str(tmp_path / "model"), {"fsdp_size": 2}, {**config, **batch})
    for theirs, ours in found:
        assert ours == pytest.approx(theirs, rel=EXACT)
        assert theirs[0] - theirs[-1] > 0.1
