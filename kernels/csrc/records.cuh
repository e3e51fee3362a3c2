// Packed records (layout.py) to bf16, in registers.

#pragma once

#include "ptx.cuh"

// Eight e2m1 of a word -> four bf16 pairs, dims 0 4, 1 5, 2 6, 3 7. One multiplication puts a nibble `s ee m` twice, its
// sign on bit 15 and its magnitude on bits 8-6, which is the value times 2^-126; the bf16 product with `scale` undoes
// that. The last pair's signs are in place.
__device__ __forceinline__ void decode_e2m1(uint32_t word, uint32_t scale, uint32_t (&pairs)[4]) {
  constexpr uint32_t kKeep = 0x81C081C0u;
  const uint32_t high = word >> 6;
  pairs[0] = mul_bf16x2(((word & 0x000F000Fu) * 0x1040u) & kKeep, scale);
  pairs[1] = mul_bf16x2(((word & 0x00F000F0u) * 0x0104u) & kKeep, scale);
  pairs[2] = mul_bf16x2(((high & 0x003C003Cu) * 0x0410u) & kKeep, scale);
  pairs[3] = mul_bf16x2((word & 0x80008000u) | (high & 0x01C001C0u), scale);
}

// The same -> 16 bytes of the tile.
__device__ __forceinline__ void decode_e2m1(uint32_t word, uint32_t scale, uint32_t address) {
  uint32_t pairs[4];
  decode_e2m1(word, scale, pairs);
  store_shared(address, pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Eight e4m3 of two words -> 16 bytes of the tile: `s eeee mmm` moves to bits 15 and 10-4, the value times 2^-120.
__device__ __forceinline__ void decode_e4m3(uint32_t low, uint32_t high, uint32_t scale, uint32_t address) {
  const uint32_t first = prmt(low, high, 0x5410);   // dims 0 1, 4 5
  const uint32_t second = prmt(low, high, 0x7632);  // dims 2 3, 6 7
  const uint32_t a = ((first << 8) & 0x80008000u) | ((first << 4) & 0x07F007F0u);
  const uint32_t b = (first & 0x80008000u) | ((first >> 4) & 0x07F007F0u);
  const uint32_t c = ((second << 8) & 0x80008000u) | ((second << 4) & 0x07F007F0u);
  const uint32_t d = (second & 0x80008000u) | ((second >> 4) & 0x07F007F0u);
  store_shared(address, mul_bf16x2(a, scale), mul_bf16x2(b, scale), mul_bf16x2(c, scale), mul_bf16x2(d, scale));
}

// Two e4m3 scales (low 16 bits) -> bf16x2 of both, times 2^(126 - 16): 2^230 in two steps, each within bf16.
__device__ __forceinline__ uint32_t e4m3_scales(uint32_t pair) {
  constexpr uint32_t kStep = 0x79007900u;  // 2^115
  const uint32_t moved = (prmt(pair, 0, 0x4140) << 4) & 0x07F007F0u;
  return mul_bf16x2(mul_bf16x2(moved, kStep), kStep);
}

// A ue8m0 scale (low byte) of e4m3 dims -> bf16x2, times 2^(120 - 16).
__device__ __forceinline__ uint32_t ue8m0_scale(uint32_t byte) {
  return min((byte & 0xFFu) + 104u, 254u) * 0x00800080u;
}

// One of e2m1 dims -> bf16x2, times 2^(126 - 16).
__device__ __forceinline__ uint32_t ue8m0_scale_e2m1(uint32_t byte) {
  return min((byte & 0xFFu) + 110u, 254u) * 0x00800080u;
}
