// The best blocks of a scan and the Top-K of listed blocks on Hopper (sm_90a). The contract is in cuda_topk.py.
//
// A cluster of blocks per row (select_cluster.cuh) where it holds the row. Otherwise what follows, for many rows too long
// for two blocks and for rows that are not aligned.
//
// One block of 1024 threads per row. `choose` finds the k best of up to 16,384 scores, which stay in registers as
// integers that order alike. The range between the least and the greatest is cut into 2048 bins, whose counts tell
// which bin holds the k-th; that bin is cut again, until a bin is taken whole or is a single value. Dividing the range
// rather than fixed digits makes two rounds of most inputs and three of the worst, and spreads counts over banks.
//
// More scores than `direct` go in two levels: the k best groups of 8 by their maxima, then the k best of those groups'
// members. A prefix sum over ballots gives each kept score its place, so results ascend; ties go to the lower position.

#include "launch.cuh"
#include "select.cuh"
#include "select_cluster.cuh"

namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kItems = 16;  // scores per thread
constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;
constexpr int kMaxKeys = kItems * kThreads;
constexpr int kMaxChosen = kMaxKeys / kGroup;

struct Shared {
  int histogram[kBins];  // zeros between uses
  int groups[kMaxChosen];   // of the second level
  int parents[kMaxChosen];  // select: their ids
  int chosen[kMaxChosen];
  uint32_t low[kWarps], high[kWarps];
  int count[kWarps], total[kWarps], kept[kWarps];
  int bin, above, inside;
};

// ---- Choose ---------------------------------------------------------------------------------------------------------

// What the k best lie above: all keys greater than `key`, and the first `ties` of those equal to it.
struct Limit {
  uint32_t key;
  int ties;
};

// The limit of the k best of the block's keys, of which 0 and kForced do not count.
__device__ __forceinline__ Limit find_limit(Shared& shared, const uint32_t (&keys)[kItems], int items, int k) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  uint32_t low = kForced, high = 0;
  int count = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i < items && keys[i] != 0 && keys[i] != kForced) {
      low = min(low, keys[i]), high = max(high, keys[i]), ++count;
    }
  }
  low = __reduce_min_sync(kAll, low), high = __reduce_max_sync(kAll, high), count = __reduce_add_sync(kAll, count);
  if (lane == 0) shared.low[warp] = low, shared.high[warp] = high, shared.count[warp] = count;
  __syncthreads();
  low = __reduce_min_sync(kAll, shared.low[lane]), high = __reduce_max_sync(kAll, shared.high[lane]);
  count = __reduce_add_sync(kAll, shared.count[lane]);
  if (count <= k) return {0, 0};
  if (k == 0) return {high, 0};

  // The k-th is the `need`-th from above of the keys from `low` to `low + span`.
  uint32_t span = high - low;
  int need = k, bits = 32 - __clz(span);
  while (bits) {
    const int shift = bits > kBinBits ? bits - kBinBits : 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i < items) {
        const uint32_t offset = keys[i] - low;
        if (offset <= span) atomicAdd(&shared.histogram[offset >> shift], 1);
      }
    }
    __syncthreads();
    // Two bins a thread, from the top down.
    const int bin = kBins - 2 - 2 * thread;
    const int upper = shared.histogram[bin + 1], lower = shared.histogram[bin];
    shared.histogram[bin + 1] = 0, shared.histogram[bin] = 0;
    const int upto = inclusive_sum(upper + lower, lane);
    if (lane == 31) shared.total[warp] = upto;
    __syncthreads();
    const int totals = shared.total[lane];
    const int before_warp = __shfl_sync(kAll, inclusive_sum(totals, lane) - totals, warp);
    const int before = before_warp + upto - upper - lower;
    if (before < need && need <= before + upper + lower) {
      const bool is_upper = need <= before + upper;
      shared.bin = is_upper ? bin + 1 : bin;
      shared.above = is_upper ? before : before + upper;
      shared.inside = is_upper ? upper : lower;
    }
    __syncthreads();
    need -= shared.above;
    low += static_cast<uint32_t>(shared.bin) << shift;
    if (shared.inside == need) return {low - 1, 0};
    bits = shift, span = (1u << shift) - 1;
  }
  return {low, need};
}

// The k best of value(0) .. value(width - 1), and `forced` (an index or -1) whatever its value; NaN is never chosen.
// Calls emit(place, index) for each, places ascending with the index, and returns their number. Width is at most
// kMaxKeys. Barriers are inside; none follows the last emit.
template <class Value, class Emit>
__device__ __forceinline__ int choose(Shared& shared, int width, int k, int forced, Value value, Emit emit) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  // A warp's keys lie together, a lane's 32 apart.
  const int items = (width + kThreads - 1) / kThreads, base = warp * items * 32 + lane;
  uint32_t keys[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int index = base + 32 * i;
    keys[i] = __float_as_uint(i < items && index < width ? value(index) : nan());
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    keys[i] = i < items && base + 32 * i == forced ? kForced : ordered(__uint_as_float(keys[i]));
  }
  const Limit limit = find_limit(shared, keys, items, forced >= 0 ? k - 1 : k);

  int counts = 0;  // above the limit, and at it from bit 16 on
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i < items) counts += (keys[i] > limit.key) + (keys[i] == limit.key) * (1 << 16);
  }
  counts = __reduce_add_sync(kAll, static_cast<uint32_t>(counts));
  if (lane == 0) shared.kept[warp] = counts;
  __syncthreads();
  const uint32_t all_of = shared.kept[lane];
  const uint32_t upto = inclusive_sum(all_of, lane);
  const uint32_t before = __shfl_sync(kAll, upto - all_of, warp), total = __shfl_sync(kAll, upto, 31);
  int above = before & 0xFFFF, tied = before >> 16;
  const uint32_t lower_lanes = (1u << lane) - 1;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i < items) {
      const bool is_above = keys[i] > limit.key, is_tied = keys[i] == limit.key;
      const uint32_t aboves = __ballot_sync(kAll, is_above), ties = __ballot_sync(kAll, is_tied);
      const int my_tied = tied + __popc(ties & lower_lanes);
      if (is_above || (is_tied && my_tied < limit.ties)) {
        emit(above + __popc(aboves & lower_lanes) + min(my_tied, limit.ties), base + 32 * i);
      }
      above += __popc(aboves), tied += __popc(ties);
    }
  }
  return static_cast<int>(total & 0xFFFF) + min(static_cast<int>(total >> 16), limit.ties);
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ Shared& begin(uint8_t* memory) {
  auto& shared = *reinterpret_cast<Shared*>(memory);
  for (int i = threadIdx.x; i < kBins; i += kThreads) shared.histogram[i] = 0;
  __syncthreads();
  let_next_kernel_start();
  wait_for_kernels_before();
  return shared;
}

__global__ void __launch_bounds__(kThreads, 1) best_blocks_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = begin(memory);
  const int64_t row = blockIdx.x;
  const int visible = load_int(p.visible, row, p.visible_wide);
  const int seen = min((visible + kGroup - 1) / kGroup, p.width);
  const float* maxima = p.scores + row * p.width;
  int* chosen = p.chosen + row * p.k;
  int number = min(seen, p.k);
  if (seen <= p.k) {
    for (int i = threadIdx.x; i < p.k; i += kThreads) chosen[i] = i < seen ? i : -1;
    return;
  }
  const int newest = p.keep_newest ? seen - 1 : -1;
  if (seen <= p.direct) {
    number = choose(
        shared, seen, p.k, newest, [&](int i) { return load_global(maxima + i); },
        [&](int place, int i) { shared.chosen[place] = i; });
  } else {
    const float* tile_max = p.group_max + row * (p.width / kGroup);
    const int tiles = choose(
        shared, (seen + kGroup - 1) / kGroup, p.k, newest < 0 ? -1 : newest / kGroup,
        [&](int i) { return load_global(tile_max + i); }, [&](int place, int i) { shared.groups[place] = i; });
    __syncthreads();
    // The newest tile is the last of the chosen.
    number = choose(
        shared, tiles * kGroup, p.k, newest < 0 ? -1 : (tiles - 1) * kGroup + newest % kGroup,
        [&](int i) {
          const int block = shared.groups[i / kGroup] * kGroup + i % kGroup;
          return block < seen ? load_global(maxima + block) : nan();
        },
        [&](int place, int i) { shared.chosen[place] = shared.groups[i / kGroup] * kGroup + i % kGroup; });
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.k; i += kThreads) chosen[i] = i < number ? shared.chosen[i] : -1;
}

__global__ void __launch_bounds__(kThreads, 1) select_in_blocks_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = begin(memory);
  const int64_t row = blockIdx.x;
  const int visible = load_int(p.visible, row, p.visible_wide), num_blocks = p.width / kGroup;
  const int* blocks = p.blocks + row * num_blocks;
  const float* scores = p.scores + row * p.width;
  const bool all = visible <= min(p.k, p.width);
  int number = max(visible, 0);
  if (!all) {
    int columns = num_blocks;
    if (p.width <= p.direct) {
      for (int i = threadIdx.x; i < num_blocks; i += kThreads) {
        shared.groups[i] = i, shared.parents[i] = load_global(blocks + i);
      }
    } else {
      const float* maxima = p.group_max + row * num_blocks;
      columns = choose(
          shared, num_blocks, p.k, -1,
          [&](int i) {
            const float top = load_global(maxima + i);
            const int block = load_global(blocks + i);
            return block >= 0 && block * kGroup < visible ? top : nan();
          },
          [&](int place, int i) { shared.groups[place] = i, shared.parents[place] = load_global(blocks + i); });
    }
    __syncthreads();
    number = choose(
        shared, columns * kGroup, p.k, -1,
        [&](int i) {
          const float score = load_global(scores + shared.groups[i / kGroup] * kGroup + i % kGroup);
          const int block = shared.parents[i / kGroup];
          return block >= 0 && block * kGroup + i % kGroup < visible ? score : nan();
        },
        [&](int place, int i) { shared.chosen[place] = shared.parents[i / kGroup] * kGroup + i % kGroup; });
  }
  __syncthreads();
  const bool wants_slots = p.slots != nullptr;
  const int64_t tokens = wants_slots ? load_int(p.requests, row, p.requests_wide) * p.request_stride : 0;
  for (int i = threadIdx.x; i < p.k; i += kThreads) {
    const int position = i < number ? (all ? i : shared.chosen[i]) : -1;
    p.chosen[row * p.k + i] = position;
    if (wants_slots) {
      const int64_t token = tokens + (static_cast<int64_t>(position) << p.ratio_shift);
      p.slots[row * p.k + i] =
          position < 0 ? -1 : load_int(p.req_to_token, token, p.req_to_token_wide) >> p.ratio_shift;
    }
  }
}

using Kernel = void (*)(Params);

template <int SPLIT, int VECTORS>
Kernel cluster_kernel(bool select) {
  return select ? select_in_cluster_kernel<SPLIT, VECTORS> : best_in_cluster_kernel<SPLIT, VECTORS>;
}

// With the fewest registers that hold a row's scores.
template <int SPLIT>
Kernel cluster_kernel(bool select, int width) {
  const int vectors = (width + SPLIT * kStep - 1) / (SPLIT * kStep);
  if (vectors <= 1) return cluster_kernel<SPLIT, 1>(select);
  if (vectors <= 2) return cluster_kernel<SPLIT, 2>(select);
  if (vectors <= 4) return cluster_kernel<SPLIT, 4>(select);
  if constexpr (SPLIT <= 8) return cluster_kernel<SPLIT, kMaxVectors>(select);
  return nullptr;  // wider rows than there are
}

// The form that `p` asks for.
Kernel choose_kernel(bool select, const Params& p) {
  switch (p.split) {
    case 1: return cluster_kernel<1>(select, p.width);
    case 2: return cluster_kernel<2>(select, p.width);
    case 4: return cluster_kernel<4>(select, p.width);
    case 8: return cluster_kernel<8>(select, p.width);
    case 16: return cluster_kernel<16>(select, p.width);
    default: return select ? select_in_blocks_kernel : best_blocks_kernel;
  }
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

cudaError_t launch(bool select, const Params& params, int rows, bool early, cudaStream_t stream) {
  const Kernel kernel = choose_kernel(select, params);
  if (params.split == 0) return launch_kernel(kernel, params, rows, kThreads, sizeof(Shared), early, stream);
  return launch_kernel(kernel, params, rows * params.split, kClusterThreads, sizeof(ClusterShared), early, stream,
                       params.split);
}

// ---- Interface ------------------------------------------------------------------------------------------------------

// Whether a row's `keys` fit the blocks' registers, and its vectors are aligned.
bool cluster_serves(const void* scores, int keys, int split) {
  const bool power = split >= 0 && split <= kMaxSplit && (split & (split - 1)) == 0;
  const bool fits = keys <= split * kMaxVectors * kStep && keys <= kMaxKeys * kGroup;
  const bool aligned = keys % kVector == 0 && reinterpret_cast<uintptr_t>(scores) % (kVector * sizeof(float)) == 0;
  return split == 0 || (power && fits && aligned);
}

}  // namespace

// Return a cudaError_t, 0 for success. `split`: blocks per row, a power of two, above 8 only where the device grants
// such clusters; 0 for one block that narrows by levels.
extern "C" int csa2_best_blocks(const void* block_max, const void* tile_max, const void* visible, int visible_wide,
                                int rows, int blocks, int k, int keep_newest, int direct, int split, void* chosen,
                                int early, void* stream) {
  if (direct > kMaxKeys || blocks > kMaxKeys * kGroup || k > kMaxChosen) return cudaErrorInvalidValue;
  if (!cluster_serves(block_max, blocks, split)) return cudaErrorInvalidValue;
  Params p = {};
  p.scores = static_cast<const float*>(block_max), p.group_max = static_cast<const float*>(tile_max);
  p.visible = visible, p.visible_wide = visible_wide, p.chosen = static_cast<int*>(chosen);
  p.width = blocks, p.k = k, p.direct = direct, p.split = split, p.keep_newest = keep_newest;
  return launch(false, p, rows, early, static_cast<cudaStream_t>(stream));
}

// `slots` may be null, and then what follows it to `ratio` is not read.
extern "C" int csa2_select_in_blocks(const void* scores, const void* block_max, const void* blocks,
                                     const void* visible, int visible_wide, int rows, int num_blocks, int k,
                                     int direct, int split, void* chosen, void* slots, const void* req_to_token,
                                     int64_t request_stride, int req_to_token_wide, const void* requests,
                                     int requests_wide, int ratio, int early, void* stream) {
  if (direct > kMaxKeys || num_blocks > kMaxKeys || k > kMaxChosen) return cudaErrorInvalidValue;
  if (!cluster_serves(scores, num_blocks * kGroup, split)) return cudaErrorInvalidValue;
  Params p = {};
  p.scores = static_cast<const float*>(scores), p.group_max = static_cast<const float*>(block_max);
  p.blocks = static_cast<const int*>(blocks), p.visible = visible, p.visible_wide = visible_wide;
  p.chosen = static_cast<int*>(chosen), p.width = num_blocks * kGroup, p.k = k, p.direct = direct, p.split = split;
  p.slots = static_cast<int64_t*>(slots);
  p.req_to_token = req_to_token, p.request_stride = request_stride;
  p.req_to_token_wide = req_to_token_wide, p.requests = requests, p.requests_wide = requests_wide;
  p.ratio_shift = ratio - 1;
  return launch(true, p, rows, early, static_cast<cudaStream_t>(stream));
}
