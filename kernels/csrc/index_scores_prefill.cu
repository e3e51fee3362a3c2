// Maxima of index scores for many rows (query tokens) of one request on Hopper (sm_90a). The contract is in
// cuda_index_scores.py.
//
// Work. A thread block takes a tile of 256 keys and some groups of rows, as many rows as fill 128 columns with their
// heads (32 heads: 4 rows). A product has keys along M and a group's columns along N. Groups of which no row sees the
// tile are left out.
//
// Keys are decoded once per block, straight into the registers of wgmma's A operand. A lane's registers of a key are 16
// bytes of its record, dims 32 * (lane % 4) on, which have one scale. That fixes the order of dims along K:
//
//     step s, position k:   dim 32 * (k % 8 / 2) + 8 * (s / 2) + 2 * (s % 2) + k / 8 + 4 * (k % 2)
//
// Queries. A first kernel puts every group's Q, in that order and with wgmma's 128-byte swizzle, and its weights into an
// image of shared memory, so that one bulk copy each brings them in.
//
// Scale. Decoded values carry a factor 2^-16 (records.cuh); maxima are multiplied by 2^16. Both steps are exact.
//
// Roles. Warpgroups 0 and 1 hold 128 keys each, two products' worth. While one product is under way, the other's
// results are weighed and summed: a lane holds a quarter of a row's heads for two keys, four lanes exchange so that each
// ends with sums of its own rows, and lanes whose keys share a block of 8 exchange for maxima. Warp 8 copies groups in,
// and writes the maxima of a group, a row's 32 side by side.
//
// Predicted per group and tile at full tensor rate, not measured: 8 x 4 products m64n128k16 of 64 cycles, 2048 cycles.
// Meanwhile a scheduler issues about 4 x 200 instructions (64 max, 64 fma, 8 loads, 9 to 12 exchanges of 4 each, per
// product), 40 % of its slots. Shared memory: 32 x 32 operand wavefronts, which ncu counts as two cycles each, that is
// all 2048, and 128 to 512 for weights. L2: 33 KB per multiprocessor, 16 bytes a cycle.

#include "launch.cuh"
#include "records.cuh"

namespace {

constexpr int kDims = 128;
constexpr int kColumns = 128;  // of a product: a group's rows times their heads
constexpr int kSteps = kDims / 16;
constexpr int kTileKeys = 256;
constexpr int kHalfKeys = 128;  // of a tile, one warpgroup's: they lie within one page of 256 tokens
constexpr int kWarpKeys = 32;
constexpr int kTileBlocks = kTileKeys / 8;
constexpr int kPageSlots = 64;
constexpr int kPageScales = 4096;  // offset of a page's scales
constexpr int kPanelBytes = kColumns * 128;  // 64 dims of every column
constexpr int kQueryBytes = 2 * kPanelBytes;
constexpr int kWeightBytes = kColumns * 4;
constexpr int kGroupBytes = kQueryBytes + kWeightBytes;
constexpr int kStages = 4;       // groups in shared memory
constexpr int kMaxGroups = 128;  // per block
constexpr int kConsumerWarps = 8;
constexpr int kThreads = kConsumerWarps * 32 + 128;  // registers are handed over by whole warpgroups
constexpr int kArrangeThreads = kColumns * 4;
constexpr int kMaximaStride = kTileBlocks + 4;  // spreads a warp's rows over banks
constexpr float kUnshift = 65536.0f;

// Rows of a group.
template <int HEADS>
constexpr int kRows = kColumns / HEADS;

struct Params {
  const uint8_t* q;         // bf16 [rows, heads, 128]
  const uint16_t* weights;  // bf16 [rows, heads]
  const uint8_t* cache;     // pages of 64 slots: 64 * 64 bytes of e2m1, then 64 * 4 ue8m0; row stride page_stride
  int64_t page_stride;
  const void* req_to_token;  // [requests, context], row stride request_stride
  int64_t request_stride;
  const void* request;  // [1]
  const void* visible;  // [rows]
  int table_wide, request_wide, visible_wide;  // int64, otherwise int32
  uint8_t* image;                              // [groups, kGroupBytes]
  float* block_max;                            // [rows, width / 8]
  float* tile_max;                             // [rows, width / 64]
  int rows, heads, ratio, width, skip;
  int block_groups;  // groups per block
};

// An entry's low word: int64 entries are little-endian, and no row, slot or request reaches 2^31.
__device__ __forceinline__ int load_int(const void* table, int64_t index, int wide) {
  return __ldg(static_cast<const int*>(table) + (index << wide));
}

// ---- Queries --------------------------------------------------------------------------------------------------------

// One block per group, four threads per column. A thread takes dims 8 * word to 8 * word + 7 of every 32, which are four
// chunks of 16 bytes of the image. Weights lie as the lanes of a product hold their columns: [8][4 lanes][2 x 2 columns].
template <int HEADS>
__global__ void __launch_bounds__(kArrangeThreads) arrange_queries_kernel(const __grid_constant__ Params params) {
  const int column = threadIdx.x / 4, word = threadIdx.x % 4;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows<HEADS> + column / HEADS;
  const int head = column % HEADS;
  uint8_t* image = params.image + static_cast<int64_t>(blockIdx.x) * kGroupBytes;
  uint4 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = make_uint4(0, 0, 0, 0);
    if (row < params.rows && head < params.heads) {
      const uint8_t* source = params.q + (row * params.heads + head) * (kDims * 2) + 64 * i + 16 * word;
      v[i] = __ldg(reinterpret_cast<const uint4*>(source));
    }
  }
  uint8_t* target = image + word / 2 * kPanelBytes + column * 128;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = i % 2 ? 0x7632 : 0x5410;
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = i < 2 ? prmt(v[j].x, v[j].z, selector) : prmt(v[j].y, v[j].w, selector);
    const int chunk = (word % 2 * 4 + i) ^ (column % 8);
    *reinterpret_cast<uint4*>(target + chunk * 16) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  if (threadIdx.x < kColumns) {
    const int place = threadIdx.x;
    const int own = place / 16 * 16 + place / 2 % 2 * 8 + place / 4 % 4 * 2 + place % 2;
    const int64_t own_row = static_cast<int64_t>(blockIdx.x) * kRows<HEADS> + own / HEADS;
    const bool exists = own_row < params.rows && own % HEADS < params.heads;
    const uint32_t bits = exists ? __ldg(params.weights + own_row * params.heads + own % HEADS) : 0;
    reinterpret_cast<float*>(image + kQueryBytes)[place] = __uint_as_float(bits << 16);
  }
}

// ---- Shared memory --------------------------------------------------------------------------------------------------

template <int HEADS>
struct alignas(1024) Shared {
  uint8_t q[kStages][kQueryBytes];
  float weights[kStages][kColumns];
  float maxima[kStages][kRows<HEADS>][kMaximaStride];
  int visible[kMaxGroups * kRows<HEADS>];  // within the width; 0 for a row that needs no scores
  int groups[kMaxGroups];                  // those that see the tile, `count` of them
  int counts[4], longest[4];               // of each of the first four warps
  uint64_t full[kStages], done[kStages];
};

// ---- Groups ---------------------------------------------------------------------------------------------------------

// What a block has to do: the first `count` of shared.groups, and how far its rows see.
struct Work {
  int count, longest;
};

template <int HEADS>
__device__ __forceinline__ Work list_groups(Shared<HEADS>& shared, const Params& params, int first, int64_t first_row,
                                            int warp, int lane) {
  constexpr int R = kRows<HEADS>;
  const int group = threadIdx.x;
  uint32_t seen = 0;
  if (warp < 4) {
    int longest = 0;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int64_t row = first_row + group * R + r;
      int visible = 0;
      if (group < params.block_groups && row < params.rows) {
        visible = min(load_int(params.visible, row, params.visible_wide), params.width);
        if (visible <= params.skip) visible = 0;
      }
      shared.visible[group * R + r] = visible;
      longest = max(longest, visible);
    }
    seen = __ballot_sync(0xFFFFFFFFu, longest > first);
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) longest = max(longest, __shfl_xor_sync(0xFFFFFFFFu, longest, mask));
    if (lane == 0) shared.counts[warp] = __popc(seen), shared.longest[warp] = longest;
  }
  __syncthreads();
  Work work = {0, 0};
  int place = __popc(seen & ((1u << lane) - 1));
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if (w < warp) place += shared.counts[w];
    work.count += shared.counts[w];
    work.longest = max(work.longest, shared.longest[w]);
  }
  if (seen >> lane & 1) shared.groups[place] = group;
  __syncthreads();
  return work;
}

// ---- Copies in, maxima out ------------------------------------------------------------------------------------------

template <int HEADS>
struct Server {
  Shared<HEADS>& shared;
  const Params& params;
  const int first;
  const int64_t first_row;
  const int lane;

  __device__ __forceinline__ void fill(int index) const {
    if (lane) return;
    const int stage = index % kStages;
    const int64_t group = first_row / kRows<HEADS> + shared.groups[index];
    const uint8_t* source = params.image + group * kGroupBytes;
    const uint32_t full = shared_address(&shared.full[stage]);
    mbarrier_expect(full, kGroupBytes);
    bulk_copy(shared_address(shared.q[stage]), source, kQueryBytes, full);
    bulk_copy(shared_address(shared.weights[stage]), source + kQueryBytes, kWeightBytes, full);
  }

  // A lane has one block of 8 entries of each row.
  __device__ __forceinline__ void write(int index) const {
    const int stage = index % kStages, group = shared.groups[index];
    const int entry = first + 8 * lane;
#pragma unroll
    for (int r = 0; r < kRows<HEADS>; ++r) {
      const int visible = shared.visible[group * kRows<HEADS> + r];
      const int64_t row = first_row + group * kRows<HEADS> + r;
      const float block = shared.maxima[stage][r][lane] * kUnshift;
      float tile = block;
#pragma unroll
      for (int mask = 1; mask < 8; mask *= 2) tile = fmaxf(tile, __shfl_xor_sync(0xFFFFFFFFu, tile, mask));
      if (entry < visible) {
        params.block_max[row * (params.width / 8) + entry / 8] = block;
        if (lane % 8 == 0) params.tile_max[row * (params.width / 64) + entry / 64] = tile;
      }
    }
  }

  __device__ __forceinline__ void serve(int count) const {
    for (int i = 0; i < min(count, kStages); ++i) fill(i);
    for (int i = 0; i < count; ++i) {
      mbarrier_wait(shared_address(&shared.done[i % kStages]), i / kStages & 1);
      write(i);
      __syncwarp();
      if (i + kStages < count) fill(i + kStages);
    }
  }
};

// ---- Scores ---------------------------------------------------------------------------------------------------------

// Lanes that differ in `mask` exchange: of COUNT entries each keeps one half, the upper one in the lanes that have the
// bit, added up or the greater of the two.
template <int COUNT, bool SUM>
__device__ __forceinline__ void fold(float* x, int mask, int lane) {
#pragma unroll
  for (int i = 0; i < COUNT / 2; ++i) {
    const float lower = x[i], upper = x[i + COUNT / 2];
    const float mine = lane & mask ? upper : lower;
    const float other = __shfl_xor_sync(0xFFFFFFFFu, lane & mask ? lower : upper, mask);
    x[i] = SUM ? mine + other : fmaxf(mine, other);
  }
}

template <int HEADS>
struct Consumer {
  static constexpr int R = kRows<HEADS>;
  // Scores that a lane ends with of a product: its rows (R = 8: two) and keys (R = 4, 8: lane / 4 and the eighth after).
  static constexpr int kLeft = R / 2;

  Shared<HEADS>& shared;
  const int lane;
  const int block;        // of 8 keys, this warp's first in the tile
  const int entry;        // this lane's first key in the request
  uint32_t keys[2][kSteps][4];  // A operands of two products: keys 0 to 15 of the warp's 32, and 16 to 31

  __device__ __forceinline__ Consumer(Shared<HEADS>& s, const Params& params, int first, int longest, int warp,
                                      int lane)
      : shared(s), lane(lane), block(warp * (kWarpKeys / 8)), entry(first + warp * kWarpKeys + lane / 4) {
    const int half = first + warp / 4 * kHalfKeys;
    int64_t slot = 0;  // of the half's first entry
    if (half < longest) {
      const int64_t request = load_int(params.request, 0, params.request_wide);
      const int64_t at = request * params.request_stride + static_cast<int64_t>(half) * params.ratio;
      slot = load_int(params.req_to_token, at, params.table_wide) / params.ratio;
    }
    const int quarter = lane % 4;
    uint4 data[4];
    uint32_t scales[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = slot + (entry - half) + 8 * i;
      const bool present = entry + 8 * i < longest;
      const int offset = at % kPageSlots;
      const uint8_t* page = params.cache + at / kPageSlots * params.page_stride;
      data[i] = load_if(present, page + offset * 64 + quarter * 16);
      scales[i] = load_byte_if(present, page + kPageScales + offset * 4 + quarter);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t scale = ue8m0_scale_e2m1(scales[i]);
      const uint32_t words[] = {data[i].x, data[i].y, data[i].z, data[i].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t pairs[4];
        decode_e2m1(words[w], scale, pairs);
        keys[i / 2][2 * w][i % 2] = pairs[0];
        keys[i / 2][2 * w][i % 2 + 2] = pairs[1];
        keys[i / 2][2 * w + 1][i % 2] = pairs[2];
        keys[i / 2][2 * w + 1][i % 2 + 2] = pairs[3];
      }
    }
  }

  // Starts a product of 16 keys per warp with a group.
  __device__ __forceinline__ void multiply(float (&d)[64], int product, int stage) const {
    const uint64_t q = descriptor(shared_address(shared.q[stage]));
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      wgmma_registers(d, keys[product][s], q + ((s / 4 * kPanelBytes + s % 4 * 32) >> 4), s > 0);
    }
    wgmma_commit();
  }

  // A product's scores, -inf where not visible.
  __device__ __forceinline__ void score(const float (&d)[64], int product, int stage, int group, float* left) const {
    float sums[2 * R] = {};  // by row, then keys lane / 4 and the eighth after
    const uint32_t weights = shared_address(shared.weights[stage]) + lane % 4 * 16;
#pragma unroll
    for (int j = 0; j < 16; j += 2) {  // columns 8 * j + 2 * (lane % 4) on
      const float4 w = load_shared_floats(weights + j * 32);
      float* sum = sums + j / (HEADS / 8) * 2;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        sum[k] = fmaf(fmaxf(d[4 * j + 2 * k], 0.0f), w.x, sum[k]);
        sum[k] = fmaf(fmaxf(d[4 * j + 2 * k + 1], 0.0f), w.y, sum[k]);
        sum[k] = fmaf(fmaxf(d[4 * j + 2 * k + 4], 0.0f), w.z, sum[k]);
        sum[k] = fmaf(fmaxf(d[4 * j + 2 * k + 5], 0.0f), w.w, sum[k]);
      }
    }
    fold<2 * R, true>(sums, 2, lane);
    fold<R, true>(sums, 1, lane);
    const int* visible = shared.visible + group * R;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const int row = R == 2 ? lane / 2 % 2 : R == 4 ? lane % 4 : lane % 4 * 2 + i / 2;
      const int eighth = R == 2 ? lane % 2 : i % 2;
      left[i] = entry + product * 16 + eighth * 8 < visible[row] ? sums[i] : -INFINITY;
    }
  }

  // Maxima of the warp's four blocks, from what the lanes have left of both products.
  __device__ __forceinline__ void store_maxima(float* left, int stage) const {
    fold<R, false>(left, 16, lane);  // which product
    if constexpr (R == 8) {
      fold<4, false>(left, 8, lane);  // which row
      fold<2, false>(left, 4, lane);  // which eighth
    } else if constexpr (R == 4) {
      fold<2, false>(left, 8, lane);
      left[0] = fmaxf(left[0], __shfl_xor_sync(0xFFFFFFFFu, left[0], 4));
    } else {
      left[0] = fmaxf(left[0], __shfl_xor_sync(0xFFFFFFFFu, left[0], 8));
      left[0] = fmaxf(left[0], __shfl_xor_sync(0xFFFFFFFFu, left[0], 4));
    }
    const int row = R == 2 ? lane / 2 % 2 : R == 4 ? lane % 4 : lane % 4 * 2 + lane / 8 % 2;
    const int eighth = R == 2 ? lane % 2 : R == 4 ? lane / 8 % 2 : lane / 4 % 2;
    const bool mine = R == 2 ? lane / 4 % 4 == 0 : R == 4 ? lane / 4 % 2 == 0 : true;
    if (mine) shared.maxima[stage][row][block + lane / 16 * 2 + eighth] = left[0];
  }

  __device__ __forceinline__ void await(int index) const {
    mbarrier_wait(shared_address(&shared.full[index % kStages]), index / kStages & 1);
  }

  __device__ __forceinline__ void consume(int count) const {
    await(0);
    for (int i = 0; i < count; ++i) {
      const int stage = i % kStages, group = shared.groups[i];
      float even[64], odd[64], left[2 * kLeft];
      multiply(even, 0, stage);
      multiply(odd, 1, stage);
      wgmma_wait_for<1>(even);
      score(even, 0, stage, group, left);
      // Here rather than later: ptxas moves the second wait up to the first, but not past a loop.
      await(min(i + 1, count - 1));
      wgmma_wait_for<0>(odd);
      score(odd, 1, stage, group, left + kLeft);
      store_maxima(left, stage);
      mbarrier_arrive_warp(shared_address(&shared.done[stage]), lane);
    }
  }
};

// ---- Kernel ---------------------------------------------------------------------------------------------------------

// Grid: x, tiles of keys; y, rows, so that the blocks of a time share their queries in L2.
template <int HEADS>
__global__ void __launch_bounds__(kThreads, 1) block_maxima_prefill_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<HEADS>*>(memory);
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int first = blockIdx.x * kTileKeys;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * params.block_groups * kRows<HEADS>;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(shared_address(&shared.full[s]), 1);
      mbarrier_init(shared_address(&shared.done[s]), kConsumerWarps * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  const Work work = list_groups(shared, params, first, first_row, warp, lane);
  if (work.count == 0) return;
  // Registers move to where they are needed; three warpgroups have 504 between them.
  if (warp >= kConsumerWarps) {
    give_registers<24>();
    if (warp == kConsumerWarps) Server<HEADS>{shared, params, first, first_row, lane}.serve(work.count);
  } else {
    take_registers<240>();
    Consumer<HEADS>(shared, params, first, work.longest, warp, lane).consume(work.count);
  }
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <int HEADS>
cudaError_t launch(const Params& params, int groups, cudaStream_t stream) {
  const cudaError_t error = launch_kernel(arrange_queries_kernel<HEADS>, params, groups, kArrangeThreads, 0, false,
                                          stream);
  if (error != cudaSuccess) return error;
  const int tiles = (params.width + kTileKeys - 1) / kTileKeys;
  const int blocks = (groups + params.block_groups - 1) / params.block_groups;
  return launch_kernel(block_maxima_prefill_kernel<HEADS>, params, dim3(tiles, blocks), kThreads,
                       sizeof(Shared<HEADS>), false, stream);
}

// ---- Interface ------------------------------------------------------------------------------------------------------

}  // namespace

// Returns a cudaError_t, 0 for success. `tile_heads` is 16, 32 or 64; a group is 128 / tile_heads rows, and `image` has
// room for all of them, 33280 bytes each. `block_groups` is 1 to 128.
extern "C" int csa2_block_maxima_prefill(const void* q, const void* weights, const void* cache, int64_t page_stride,
                                         const void* req_to_token, int64_t request_stride, int table_wide,
                                         const void* request, int request_wide, const void* visible, int visible_wide,
                                         void* image, void* block_max, void* tile_max, int rows, int heads, int ratio,
                                         int width, int skip, int tile_heads, int block_groups, void* stream) {
  Params p = {};
  p.q = static_cast<const uint8_t*>(q), p.weights = static_cast<const uint16_t*>(weights);
  p.cache = static_cast<const uint8_t*>(cache), p.page_stride = page_stride;
  p.req_to_token = req_to_token, p.request_stride = request_stride, p.table_wide = table_wide;
  p.request = request, p.request_wide = request_wide, p.visible = visible, p.visible_wide = visible_wide;
  p.image = static_cast<uint8_t*>(image);
  p.block_max = static_cast<float*>(block_max), p.tile_max = static_cast<float*>(tile_max);
  p.rows = rows, p.heads = heads, p.ratio = ratio, p.width = width, p.skip = skip, p.block_groups = block_groups;
  if (heads < 1 || heads > tile_heads || rows < 1 || width < 1) return cudaErrorInvalidValue;
  if (block_groups < 1 || block_groups > kMaxGroups) return cudaErrorInvalidValue;
  const int group_rows = kColumns / tile_heads, groups = (rows + group_rows - 1) / group_rows;
  const auto on = static_cast<cudaStream_t>(stream);
  switch (tile_heads) {
    case 16: return launch<16>(p, groups, on);
    case 32: return launch<32>(p, groups, on);
    case 64: return launch<64>(p, groups, on);
    default: return cudaErrorInvalidValue;
  }
}
