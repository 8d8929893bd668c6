"""The Triton sources; importing them needs Triton.

``adam`` belongs to ``host_updates.py``, ``take_changed`` to ``masters.py``. The kernels of ``triton_codes.py`` (one program works on one
chunk) are ``mean_of`` to ``take``, and those of ``triton_quantize.py`` (one program works on one block) ``scale_of`` to ``dequantize``.
"""

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


@triton.jit
def scale_of(values, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scale of one block: 0 if all elements are (almost) zero, NaN if an element is not finite."""
    # Compared as integers, magnitudes keep their order, followed by infinity and NaN.
    largest = tl.max(tl.abs(values).to(tl.int32, bitcast=True), 0)
    magnitude = largest.to(tl.float32, bitcast=True)
    scale = tl.div_rn(magnitude, tl.zeros_like(magnitude) + LARGEST)
    scale = tl.where(largest < 0x0D800000, 0.0, scale)  # below 2**-100
    return tl.where(largest >= 0x7F800000, float("nan"), scale)


@triton.jit
def integers_of(values, scale, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the integers nearest to the quotients, as floats; adding 1.5 * 2**23 rounds to an integer."""
    live = scale > 0.0
    by = tl.zeros_like(values) + tl.where(live, scale, 1.0)
    quotient = tl.div_rn(tl.where(live, values, 0.0), by)
    if BITS == 8:
        return (quotient + 12582912.0) - 12582912.0
    twice = (tl.abs(quotient) * 2.0 - 0.5 + 12582912.0) - 12582912.0
    found = tl.zeros_like(quotient)
    for k in tl.static_range(1, 8):
        found += tl.where(twice >= k * k, 1.0, 0.0)
    return tl.where(quotient < 0.0, 0.0 - found, found)


@triton.jit
def multiples_of(integers, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the multiples of the scale that the integers represent."""
    if BITS == 8:
        return integers
    return integers * (tl.abs(integers) + 1.0) * 0.5


@triton.jit
def read_integers(codes, at, inside, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the integers of one block, as floats."""
    if BITS == 8:
        return tl.load(codes + at, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    byte = tl.load(codes + at // 2, mask=inside, other=0).to(tl.int32)
    half = (byte >> ((at % 2) * 4).to(tl.int32)) & 15
    return ((half ^ 8) - 8).to(tl.float32)


@triton.jit
def write_integers(integers, codes, start, at, inside, count, BITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the integers of one block."""
    whole = integers.to(tl.int32)
    if BITS == 8:
        tl.store(codes + at, (whole & 255).to(tl.uint8), mask=inside)
    else:
        halves = tl.reshape(tl.where(inside, whole & 15, 0), (BLOCK // 2, 2)) << (4 * tl.arange(0, 2))[None, :]
        byte = start // 2 + tl.arange(0, BLOCK // 2)
        tl.store(codes + byte, tl.sum(halves, 1).to(tl.uint8), mask=byte * 2 < count)


@triton.jit
def quantize(  # type: ignore[no-untyped-def]
    values, scales, scales_stride, codes, codes_stride, error_scales, error_scales_stride, error_codes, error_codes_stride,
    count, keep, take,
    BITS: tl.constexpr, LARGEST: tl.constexpr, HAS_ERROR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Encode one block: write its scale, its integers, and their error."""
    per_part = (count + BLOCK - 1) // BLOCK
    part, block = tl.program_id(0).to(tl.int64) // per_part, tl.program_id(0).to(tl.int64) % per_part
    start = block * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(values + part * count + at, mask=inside, other=0.0).to(tl.float32)
    old = tl.zeros_like(value)
    lost_scale, lost_codes = error_scales + part * error_scales_stride + block, error_codes + part * error_codes_stride
    if HAS_ERROR:
        old = read_integers(lost_codes, at, inside, 8) * tl.load(lost_scale)
        value += old
    scale = scale_of(value, LARGEST)
    integers = integers_of(value, scale, BITS)
    tl.store(scales + part * scales_stride + block, scale)
    write_integers(integers, codes + part * codes_stride, start, at, inside, count, BITS, BLOCK)
    if HAS_ERROR:
        mixed = old * keep + (value - multiples_of(integers, BITS) * scale) * take
        found = scale_of(mixed, 127)
        found = tl.where(found > 0.0, found, 0.0)
        by = tl.zeros_like(value) + scale
        tl.store(lost_scale, found, mask=scale == scale)  # not NaN
        write_integers(integers_of(mixed, found, 8), lost_codes, start, at, inside & (by == by), count, 8, BLOCK)


@triton.jit
def dequantize(  # type: ignore[no-untyped-def]
    scales, scales_stride, codes, codes_stride, out, count,
    WORKERS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decode one block: the sum over workers, in their order."""
    per_part = (count + BLOCK - 1) // BLOCK
    part, block = tl.program_id(0).to(tl.int64) // per_part, tl.program_id(0).to(tl.int64) % per_part
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    first = part * WORKERS
    one = multiples_of(read_integers(codes + first * codes_stride, at, inside, BITS), BITS)
    total = one * tl.load(scales + first * scales_stride + block)
    for worker in range(1, WORKERS):
        row = first + worker
        one = multiples_of(read_integers(codes + row * codes_stride, at, inside, BITS), BITS)
        total += one * tl.load(scales + row * scales_stride + block)
    tl.store(out + part * count + at, total.to(out.dtype.element_ty), mask=inside)
