"""The Triton source of ``triton_quantize.py``; importing it needs Triton. One program works on one block."""

# No postponed annotations here: Triton reads `tl.constexpr` from them.
import triton
import triton.language as tl


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
