"""The Triton sources of Adam in ``host_updates.py`` and of ``masters.py``; importing them needs Triton."""

# No postponed annotations here: Triton reads `tl.constexpr` from them.
import triton
import triton.language as tl


@triton.jit
def adam(  # type: ignore[no-untyped-def]
    master, grad, exp_avg, exp_avg_sq, low, count,
    grad_factor, mean_weight, beta2, square_weight, root_divisor, eps, minus_step, decay,
    DECAY_MODE: tl.constexpr, HAS_LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of elements; the arguments are those of the native library's ``struct hfz_adam_rule``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    p = tl.load(master + at, mask=inside)
    g = tl.load(grad + at, mask=inside).to(tl.float32) * grad_factor
    m = tl.load(exp_avg + at, mask=inside).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside).to(tl.float32)
    if DECAY_MODE == 1:
        g += p * decay
    if DECAY_MODE == 2:
        p *= decay
    m += mean_weight * (g - m)
    v = v * beta2 + square_weight * g * g
    p += minus_step * m / (tl.sqrt(v) / root_divisor + eps)
    tl.store(master + at, p, mask=inside)
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    if HAS_LOW:
        tl.store(low + at, p.to(low.dtype.element_ty), mask=inside)


@triton.jit
def take_changed(master, shard, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy to ``master`` the elements of ``shard`` that differ from the master's value in the shard's dtype; write no other."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    present = tl.load(master + at, mask=inside)
    shown = tl.load(shard + at, mask=inside)
    differs = present.to(shard.dtype.element_ty).to(tl.float32) != shown.to(tl.float32)
    tl.store(master + at, shown.to(tl.float32), mask=inside & differs)
