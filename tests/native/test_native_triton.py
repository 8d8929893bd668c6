"""The Triton kernels in Triton's interpreter, against the host's passes. Needs the package triton, which CPU builds of torch lack."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from hf_zero.native import masters, triton_codes, triton_quantize
from tests.support.processes import run_python

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton (pip install triton; it comes with CUDA)"
)

COMPARE = """
import itertools, torch
from hf_zero.native.host_updates import adam_reference
from hf_zero.native.host_updates import AdamRule
from hf_zero.native.host_updates import adam_triton
dtypes = (torch.float32, torch.bfloat16, torch.float16)
for count, grad, moment, low in itertools.product((0, 1, 1500), dtypes, dtypes[:2], (None, *dtypes[1:])):
    for decay, decoupled, correction in ((0.0, True, True), (0.1, True, True), (0.1, False, False)):
        torch.manual_seed(0)
        ours = [torch.randn(count), torch.randn(count).to(grad), torch.randn(count).to(moment), torch.rand(count).to(moment)]
        ours.append(None if low is None else torch.zeros(count, dtype=low))
        theirs = [None if tensor is None else tensor.clone() for tensor in ours]
        options = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay, decoupled=decoupled, bias_correction=correction)
        adam_triton(*ours, AdamRule(**options, step=3, grad_factor=0.5))
        adam_reference(*theirs, AdamRule(**options, step=3, grad_factor=0.5))
        for one, other in zip(ours, theirs):
            if one is not None:
                rtol = 1e-5 if one.dtype == torch.float32 else 2.0**-7
                torch.testing.assert_close(one, other, rtol=rtol, atol=1e-6)
print("same")
"""

CODES = """
import itertools, torch
from hf_zero.native import codes_reference, triton_codes
from tests.native.codes import differences, step, vectors

assert triton_codes.agrees(torch.device("cpu"))
lengths = [2300, 1, 1024]
table, _, inside = vectors(lengths, 0, 0)
for seed, dead in itertools.product(range(6), (False, True)):
    alive = inside & (torch.rand(table.numel, generator=torch.Generator().manual_seed(seed)) < 0.9) if dead else None
    assert not differences(step(triton_codes, lengths, seed, alive), step(codes_reference, lengths, seed, alive)), (seed, dead)
print("same")
"""

MASTERS = """
import torch
from hf_zero.native import masters

assert masters.agrees(torch.device("cpu"))
for count in (0, 1, 5000):
    torch.manual_seed(count)
    master = torch.randn(count)
    shard = master.half()
    chosen = torch.rand(count) < 0.1
    shard[chosen] = torch.randn(int(chosen.sum())).half()
    found = master.clone()
    masters._with_triton(found, shard)
    assert torch.equal(found, torch.where(master.half() == shard, master, shard.float()))
print("same")
"""


QUANTIZED = """
import itertools, torch
from hf_zero.native import quantize_reference, triton_quantize
from tests.native.block_codes import differences, step
from tests.native.libraries import values

assert triton_quantize.agrees(torch.device("cpu"))
dtypes = (torch.float32, torch.bfloat16, torch.float16)
for bits, dtype, (count, parts), finite in itertools.product((8, 4), dtypes, ((300, 2), (517, 1), (1, 3)), (True, False)):
    vectors = [values(count * parts, seed, dtype=dtype, finite=finite) for seed in range(2)]
    mine, theirs = (step(functions, vectors, bits, parts) for functions in (triton_quantize, quantize_reference))
    del mine["sum in torch.bfloat16"]  # Triton's interpreter cuts off, its compiler rounds
    assert not differences(mine, theirs), (bits, dtype, count, finite)
print("same")
"""


@needs_triton
def test_quantized_blocks_equal_plain_torch_bit_for_bit() -> None:
    assert run_python(QUANTIZED, env={"TRITON_INTERPRET": "1"}).split()[-1] == "same"


@needs_triton
def test_masters_take_what_changed_as_plain_torch_does() -> None:
    assert run_python(MASTERS, env={"TRITON_INTERPRET": "1"}).split()[-1] == "same"


@needs_triton
def test_codes_equal_plain_torch_bit_for_bit() -> None:
    assert run_python(CODES, env={"TRITON_INTERPRET": "1"}).split()[-1] == "same"


@needs_triton
@pytest.mark.timeout(600)
def test_all_kernels_compile_for_gpus(tmp_path: Path) -> None:
    out = run_python("from tests.native.triton_compile import main; main()", env={"TRITON_CACHE_DIR": str(tmp_path)}, timeout=500)
    assert out.split()[-1] == "compiled"


@pytest.mark.gpu
def test_codes_serve_on_a_gpu() -> None:
    device = torch.device("cuda")
    for functions in (triton_codes, triton_quantize, masters):
        assert functions.serves(device) and functions.agrees(device)


@needs_triton
def test_kernel_equals_the_hosts_pass() -> None:
    assert run_python(COMPARE, env={"TRITON_INTERPRET": "1"}).split()[-1] == "same"


def test_without_triton_it_says_what_is_missing() -> None:
    out = run_python("""
        import sys
        sys.modules["triton"] = None
        import torch
        from hf_zero.native.host_updates import AdamRule
        from hf_zero.native.host_updates import adam_triton, is_available
        assert not is_available()
        rule = AdamRule(lr=1.0, betas=(0.9, 0.9), eps=1.0, weight_decay=0.0, decoupled=True, step=1)
        try:
            adam_triton(*(torch.zeros(4) for _ in range(4)), None, rule)
        except ImportError as error:
            print(error)
    """)
    assert "needs the package triton" in out
