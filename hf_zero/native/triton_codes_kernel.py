"""The Triton source of ``triton_codes.py``; importing it needs Triton. One program works on one chunk."""

# No postponed annotations here: Triton reads `tl.constexpr` from them.
import triton
import triton.language as tl


@triton.jit
def mean_of(sent_bits, bits_stride, sent_scales, scales_stride, k, at, inside, WORKERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the mean over workers of chunk ``k``, summed in the workers' order."""
    place = (at % 8).to(tl.int32)
    byte = tl.load(sent_bits + at // 8, mask=inside, other=0).to(tl.int32)
    scale = tl.load(sent_scales + k)
    total = tl.where(((byte >> place) & 1) != 0, scale, -scale)
    for worker in range(1, WORKERS):
        row = tl.cast(worker, tl.int64)
        byte = tl.load(sent_bits + row * bits_stride + at // 8, mask=inside, other=0).to(tl.int32)
        scale = tl.load(sent_scales + row * scales_stride + k)
        total += tl.where(((byte >> place) & 1) != 0, scale, -scale)
    return tl.div_rn(total, tl.zeros_like(total) + WORKERS)


@triton.jit
def compress(  # type: ignore[no-untyped-def]
    starts, counts, momentum, grad, beta, weight, sent_bits, bits_stride, sent_scales, scales_stride,
    alive, error, bits, scales,
    WORKERS: tl.constexpr, HAS_FRESH: tl.constexpr, HAS_SENT: tl.constexpr, HAS_ALIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Encode one chunk of the error plus fresh momentum, or plus the mean of the workers' codes: write its signs, its scale and the new
    error.
    """
    k = tl.program_id(0).to(tl.int64)
    start, count = tl.load(starts + k), tl.load(counts + k)
    within = tl.arange(0, BLOCK)
    inside, at = within < count, start + within
    value = tl.load(error + at, mask=inside, other=0.0)
    if HAS_FRESH:
        value += tl.load(momentum + at, mask=inside, other=0.0) * beta + tl.load(grad + at, mask=inside, other=0.0) * weight
    if HAS_SENT:
        value += mean_of(sent_bits, bits_stride, sent_scales, scales_stride, k, at, inside, WORKERS)
    takes = inside
    if HAS_ALIVE:
        takes = takes & (tl.load(alive + at, mask=inside, other=0) != 0)
    value = tl.where(takes, value, 0.0)
    number = tl.maximum(tl.sum(takes.to(tl.int32), 0), 1)
    scale = (tl.sum(tl.abs(value).to(tl.float64), 0) / number.to(tl.float64)).to(tl.float32)
    tl.store(scales + k, scale)
    positive = (value >= 0.0) & inside
    by_byte = tl.reshape(positive.to(tl.int32), (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :]
    byte = tl.arange(0, BLOCK // 8)
    tl.store(bits + start // 8 + byte, tl.sum(by_byte, 1).to(tl.uint8), mask=byte * 8 < count)
    lost = value - tl.where(positive, scale, -scale)
    tl.store(error + at, tl.where(takes, lost, 0.0), mask=inside)


@triton.jit
def decompress(  # type: ignore[no-untyped-def]
    starts, counts, sent_bits, bits_stride, sent_scales, scales_stride, alive, out,
    WORKERS: tl.constexpr, HAS_ALIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decode one chunk to the mean of the workers' vectors."""
    k = tl.program_id(0).to(tl.int64)
    start, count = tl.load(starts + k), tl.load(counts + k)
    within = tl.arange(0, BLOCK)
    inside, at = within < count, start + within
    value = mean_of(sent_bits, bits_stride, sent_scales, scales_stride, k, at, inside, WORKERS)
    if HAS_ALIVE:
        value = tl.where(tl.load(alive + at, mask=inside, other=0) != 0, value, 0.0)
    tl.store(out + at, value, mask=inside)


@triton.jit
def take(  # type: ignore[no-untyped-def]
    starts, counts, first, begin, bits, scales, alive, momentum, master, variance,
    decay, divisor, eps, minus_step,
    DECAYS: tl.constexpr, EPS_INSIDE: tl.constexpr, HAS_ALIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decode chunk ``first + program`` of a momentum and update along it; momentum, master and variance begin at element ``begin``."""
    k = tl.program_id(0).to(tl.int64) + first
    start, count = tl.load(starts + k), tl.load(counts + k)
    within = tl.arange(0, BLOCK)
    inside, at = within < count, start + within
    m = mean_of(bits, 0, scales, 0, k, at, inside, 1)
    if HAS_ALIVE:
        m = tl.where(tl.load(alive + at, mask=inside, other=0) != 0, m, 0.0)
    to = at - begin
    p, v = tl.load(master + to, mask=inside, other=0.0), tl.load(variance + to, mask=inside, other=0.0)
    if DECAYS:
        p *= decay
    by = tl.zeros_like(v) + divisor
    below = tl.div_rn(tl.sqrt_rn(v), by) + eps
    if EPS_INSIDE:
        below = tl.sqrt_rn(tl.div_rn(v, by) + eps)
    tl.store(momentum + to, m, mask=inside)
    tl.store(master + to, p + tl.div_rn(m, below) * minus_step, mask=inside)
