"""The record formats' bits inside Triton kernels: the device form of `records.py`, shared by the other kernels.

Encoding (fp32 in, bytes as int32 out) is bit-exact with `records.py`: nearest even, saturating, sign of zero kept.

Decoding moves bits and multiplies once in bf16, because SM80 converts no fp8 and nothing below SM100 fp4:

    e4m3  s eeee mmm -> bf16 s 0000eeee mmm0000, which is the value * 2^-120, subnormals included
    e2m1  s ee m     -> bf16 s 000000ee m000000, which is the value * 2^-126, subnormals included

The multiplier of a group carries the opposite power and the group's scale. One power of two is left in:
decoded tiles are `value * 2^-16`, since 2^126 times an e4m3 scale would overflow bf16. Callers
multiply a sum by `UNSHIFT`; both steps are exact. Values above 2^31 saturate their scale, far outside what a
normalised latent can hold.

A byte pair holds an even dim low and an odd dim high, so a decoded tile comes as two, [..., even dims] and
[..., odd dims]: a dot product over both needs no interleaving. The inline PTX decodes two values per
instruction; the plain form gives the same bits and is what Triton's interpreter runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Decoded tiles hold value / UNSHIFT.
UNSHIFT = tl.constexpr(65536.0)

_EVEN_ODD_E4M3 = tl.constexpr("""
{
    .reg .b32 s, m, zero;
    mov.b32 zero, 0x80008000;
    shl.b32 s, $2, 8;
    shl.b32 m, $2, 4;
    and.b32 s, s, 0x80008000;
    lop3.b32 s, m, 0x07F007F0, s, 0xEA;
    fma.rn.bf16x2 $0, s, $3, zero;
    and.b32 s, $2, 0x80008000;
    shr.u32 m, $2, 4;
    lop3.b32 s, m, 0x07F007F0, s, 0xEA;
    fma.rn.bf16x2 $1, s, $3, zero;
}
""")

_EVEN_ODD_E2M1 = tl.constexpr("""
{
    .reg .b32 t, s, m, zero, none;
    mov.b32 zero, 0x80008000;
    mov.b32 none, 0;
    prmt.b32 t, $4, none, 0x4140;
    shl.b32 s, t, 12;
    shl.b32 m, t, 6;
    and.b32 s, s, 0x80008000;
    lop3.b32 s, m, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $0, s, $5, zero;
    shl.b32 s, t, 8;
    shl.b32 m, t, 2;
    and.b32 s, s, 0x80008000;
    lop3.b32 s, m, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $2, s, $5, zero;
    prmt.b32 t, $4, none, 0x4342;
    shl.b32 s, t, 12;
    shl.b32 m, t, 6;
    and.b32 s, s, 0x80008000;
    lop3.b32 s, m, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $1, s, $6, zero;
    shl.b32 s, t, 8;
    shl.b32 m, t, 2;
    and.b32 s, s, 0x80008000;
    lop3.b32 s, m, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $3, s, $6, zero;
}
""")

_QUARTERS_E2M1 = tl.constexpr("""
{
    .reg .b32 s, m, zero;
    mov.b32 zero, 0x80008000;
    shl.b32 s, $4, 12;
    shl.b32 m, $4, 6;
    and.b32 s, s, 0x80008000;
    lop3.b32 s, m, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $0, s, $5, zero;
    shl.b32 s, $4, 8;
    shl.b32 m, $4, 2;
    and.b32 s, s, 0x80008000;
    lop3.b32 s, m, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $1, s, $5, zero;
    shl.b32 s, $4, 4;
    shr.u32 m, $4, 2;
    and.b32 s, s, 0x80008000;
    lop3.b32 s, m, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $2, s, $5, zero;
    and.b32 s, $4, 0x80008000;
    shr.u32 m, $4, 6;
    lop3.b32 s, m, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $3, s, $5, zero;
}
""")


def uses_inline_ptx() -> bool:
    """Whether kernels decode with inline PTX: always, except in the interpreter, which has none."""
    return not triton.knobs.runtime.interpret


def compute_capability(device: torch.device) -> int:
    """A card's as one number, 90 for 9.0; 0 for the CPU, which is Triton's interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def check_rows(name: str, tensor: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise unless `tensor` has `shape` (None: any size), one of `dtypes`, and unit stride in its last dim."""
    fits = tensor.ndim == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        raise ValueError(f"{name} must have shape {wanted}, got {list(tensor.shape)}: reshape it at the call")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}: convert it at the call")
    if tensor.numel() and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dim, got strides {tensor.stride()}: copy it first")


INT_TYPES = (torch.int32, torch.int64)


@triton.jit
def _from_bits(bits):
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def e4m3_multiplier(scale):
    """ue8m0 bytes of an e4m3 group as int32 -> bf16 2^(120 - 16) * scale."""
    return _from_bits(tl.minimum(scale + 104, 254) << 7)


@triton.jit
def e2m1_multiplier(scale):
    """ue8m0 bytes of an e2m1 group as int32 -> bf16 2^(126 - 16) * scale."""
    return _from_bits(tl.minimum(scale + 110, 254) << 7)


@triton.jit
def nvfp4_multiplier(scale):
    """e4m3 bytes of an e2m1 group as int32 -> bf16 2^(126 - 16) * scale, the 2^-120 of the moved bits undone."""
    # 2^230 in two steps, each within fp32.
    moved = _from_bits((scale & 0x7F) << 4).to(tl.float32)
    return ((moved * 41538374868278621028243970633760768.0) * 41538374868278621028243970633760768.0).to(tl.bfloat16)


@triton.jit
def decode_e4m3_pairs(pairs, multiplier, PTX: tl.constexpr):
    """int16 [...] of two e4m3 bytes, bf16 multiplier (broadcast) -> bf16 even dims [...], odd dims [...]."""
    if PTX:
        even, odd = tl.inline_asm_elementwise(
            _EVEN_ODD_E4M3, "=r,=r,r,r", [pairs, multiplier], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        bits = pairs.to(tl.int32)
        scale = multiplier.to(tl.float32)
        even = (_from_bits(((bits & 0x80) << 8) | ((bits & 0x7F) << 4)).to(tl.float32) * scale).to(tl.bfloat16)
        odd = (_from_bits((bits & 0x8000) | ((bits & 0x7F00) >> 4)).to(tl.float32) * scale).to(tl.bfloat16)
    return even, odd


@triton.jit
def decode_e2m1_pairs(pairs, multiplier, PTX: tl.constexpr):
    """uint8 [...] of two nibbles, bf16 multiplier (broadcast) -> bf16 even dims [...], odd dims [...]."""
    if PTX:
        even, odd = tl.inline_asm_elementwise(
            _EVEN_ODD_E2M1,
            "=r,=r,=r,=r,r,r,r",
            [pairs, multiplier],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        bits = pairs.to(tl.int32)
        scale = multiplier.to(tl.float32)
        even = (_from_bits(((bits & 0x8) << 12) | ((bits & 0x7) << 6)).to(tl.float32) * scale).to(tl.bfloat16)
        odd = (_from_bits(((bits & 0x80) << 8) | ((bits & 0x70) << 2)).to(tl.float32) * scale).to(tl.bfloat16)
    return even, odd


@triton.jit
def decode_e2m1_quarters(words, multiplier, PTX: tl.constexpr):
    """int16 [...] of four nibbles, bf16 multiplier (broadcast) -> bf16 dims 0, 1, 2, 3 modulo 4, [...] each."""
    if PTX:
        zero, one, two, three = tl.inline_asm_elementwise(
            _QUARTERS_E2M1,
            "=r,=r,=r,=r,r,r",
            [words, multiplier],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        zero, one = decode_e2m1_pairs(words & 0xFF, multiplier, PTX)
        two, three = decode_e2m1_pairs((words >> 8) & 0xFF, multiplier, PTX)
    return zero, one, two, three


@triton.jit
def encode_e4m3(x):
    """fp32 within +-448 -> e4m3 bytes as int32, nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2^-6 codes step by 2^-9, which is the spacing of fp32 at 2^14: adding that rounds.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def decode_e4m3(code):
    """Non-negative e4m3 bytes as int32 -> fp32."""
    normal = (((code >> 3) + 120) << 23 | ((code & 7) << 20)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def with_sign(value, sign):
    """fp32 `value` >= 0, negative where `sign`, bit 31 of an int32, is set. (Triton 3.6's minus makes +0 of 0.)"""
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def signed_e4m3(code):
    """e4m3 bytes as int32 -> fp32."""
    return with_sign(decode_e4m3(code & 0x7F), (code & 0x80) << 24)


@triton.jit
def encode_e2m1(x):
    """fp32 -> e2m1 nibbles as int32, nearest even, saturating."""
    m = tl.abs(x)
    # A midpoint belongs to the neighbour with the even code.
    code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32) + (m >= 1.75).to(tl.int32)
    code += (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32) + (m > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def ceil_exponent(x):
    """Positive normal fp32 -> biased exponent of the power of two at or above it, as int32."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def exp2_of_biased(exponent):
    """Biased exponents 1..254 as int32 -> fp32 power of two."""
    return (exponent << 23).to(tl.float32, bitcast=True)
