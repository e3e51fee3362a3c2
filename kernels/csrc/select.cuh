// What both forms of the selection share (select.cu: one block per row; select_cluster.cuh: a cluster of blocks).

#pragma once

#include "ptx.cuh"

namespace {

constexpr int kGroup = 8;  // blocks of a tile, entries of a block
constexpr uint32_t kAll = 0xFFFFFFFFu;
constexpr uint32_t kForced = 0xFFFFFFFFu;  // no score maps to it

struct Params {
  const float* scores;     // best blocks: block maxima [rows, width]; select: [rows, width]
  const float* group_max;  // [rows, width / 8]
  const int* blocks;       // select: [rows, width / 8]
  const void* visible;     // [rows]
  int* chosen;             // [rows, k]
  int visible_wide;
  int width, k;
  int direct;  // one block per row
  int split;   // blocks per row; 0 for one block that narrows by levels
  int keep_newest;  // best blocks
  // select: int64 [rows, k] slots of the chosen, unless null.
  int64_t* slots;
  const void* req_to_token;  // [requests, context], row stride request_stride
  int64_t request_stride;
  const void* requests;  // [rows]
  int req_to_token_wide, requests_wide, ratio_shift;
};

// Orders as the scores do; 0, which no score maps to, for NaN.
__device__ __forceinline__ uint32_t ordered(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 becomes +0
  const uint32_t sign = static_cast<int>(bits) >> 31;
  return score == score ? bits ^ (sign | 0x80000000u) : 0;
}

__device__ __forceinline__ float nan() { return __uint_as_float(0x7FC00000u); }

__device__ __forceinline__ int inclusive_sum(int x, int lane) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(kAll, x, by);
    if (lane >= by) x += other;
  }
  return x;
}

}  // namespace
