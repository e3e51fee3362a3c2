// The selection by a cluster of thread blocks per row: few rows leave most of the card idle, and what one block takes
// for a row is time, not work; of many rows clusters are of one or two. The contract is in cuda_topk.py.
//
// Keys. Every score of a row is read at once, by all blocks, into registers: no level depends on another's choice, and
// maxima of groups are not needed. Scores become integers that order alike; 0 stands for none.
//
// Rounds. Three rounds of 12, 12 and 8 bits find the k-th key; most rows end after the second, when the bin of the k-th
// is taken whole. In a round each block counts its keys by digit (4096 bins) in its shared memory and sends the sums of
// 32 bins each to all blocks. When those of all are there, its first warp finds the 32 bins that hold the k-th, fetches
// them from all blocks and finds the one: every block learns the same, nothing more need be said. As the counts come
// block by block, it also learns how many keys the blocks before it keep, which is where its own go.
//
// Sums are sent with their arrival counted: a barrier of the cluster that orders memory waits for the whole card's (a
// MEMBAR.GPU in its assembly). Every round has counts of its own, since other blocks may still read those of the last.

#pragma once

#include "select.cuh"

namespace {

constexpr int kClusterThreads = 512;
constexpr int kClusterWarps = kClusterThreads / 32;
constexpr int kVector = 4;                        // scores of one load
constexpr int kWarpStep = 32 * kVector;           // of a warp's
constexpr int kStep = kClusterThreads * kVector;  // of a block's
constexpr int kMaxVectors = 8;                    // per thread
constexpr int kMaxSplit = 16;                     // blocks per row
constexpr int kRounds = 3;
constexpr int kDigitBits = 12;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kFine = 32;               // bins of a sum, one for each lane
constexpr int kSums = kDigits / kFine;  // four for each lane

// The bin of the k-th key. Counts are of the whole row; `before`: of the blocks before this one.
struct Found {
  int bin;  // -1: there are fewer than k keys, and `above` is all of them
  int above, above_before;
  int inside, inside_before;
};

struct alignas(16) ClusterShared {
  int counts[kRounds][kDigits];
  int sums[kRounds][kMaxSplit][kSums];  // of each block's counts
  Found found;
  uint32_t kept[kClusterWarps];
  uint64_t arrived[kRounds];  // of the sums
};

// What a block keeps: keys greater than `key`, and the first `ties` of the row's keys equal to it.
struct Share {
  uint32_t key;
  int ties;
  int above_before, ties_before;  // in the blocks before it
  int number;                     // that the row keeps
};

struct Place {
  int64_t row;
  int rank;   // of the block
  int first;  // of the thread, among those of all blocks
};

template <int SPLIT>
__device__ __forceinline__ Place place_of() {
  const unsigned block = blockIdx.x;
  const int rank = block % SPLIT;
  return {block / SPLIT, rank, static_cast<int>(rank * kClusterThreads + threadIdx.x)};
}

// Vectors of a thread, for `scores` in a row.
template <int SPLIT>
__device__ __forceinline__ int vectors_for(unsigned scores) {
  return (scores + SPLIT * kStep - 1) / (SPLIT * kStep);
}

// Before what follows: open_to_others.
template <int SPLIT>
__device__ __forceinline__ void prepare(ClusterShared& shared) {
  if (SPLIT > 1 && threadIdx.x == 0) {
    for (int round = 0; round < kRounds; ++round) mbarrier_init(shared_address(&shared.arrived[round]), 1);
    mbarrier_init_fence();
  }
  auto* counts = reinterpret_cast<uint4*>(shared.counts);
#pragma unroll
  for (int i = 0; i < kRounds * kDigits / 4 / kClusterThreads; ++i) {
    counts[i * kClusterThreads + threadIdx.x] = make_uint4(0, 0, 0, 0);
  }
}

// The counts are clear, and other blocks may send once they have met this one.
template <int SPLIT>
__device__ __forceinline__ void open_to_others(ClusterShared& shared) {
  __syncthreads();
  if (SPLIT == 1) return;
  if (threadIdx.x == 0) {
    for (int round = 0; round < kRounds; ++round) {
      mbarrier_expect(shared_address(&shared.arrived[round]), SPLIT * kSums * static_cast<int>(sizeof(int)));
    }
  }
  __syncwarp();
  cluster_arrive();
}

// Where a thread's first vector lies; the next ones of a warp follow it, so that a warp's scores lie together.
__device__ __forceinline__ int first_score(int rank, int vectors) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  return (rank * kClusterWarps + warp) * vectors * kWarpStep + lane * kVector;
}

// ---- Rounds

// Sends the sums of this block's counts to all blocks.
template <int SPLIT>
__device__ __forceinline__ void send_sums(ClusterShared& shared, int round, int rank) {
  static_assert(kDigits == 8 * kClusterThreads && kFine == 4 * 8 && kMaxSplit == 16);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto* counts = reinterpret_cast<const uint4*>(shared.counts[round]) + 2 * threadIdx.x;
  const uint4 a = counts[0], b = counts[1];
  uint32_t sum = (a.x + a.y + a.z + a.w) + (b.x + b.y + b.z + b.w);
  sum += __shfl_xor_sync(kAll, sum, 1);
  sum += __shfl_xor_sync(kAll, sum, 2);
  // A warp's eight sums, four lanes each: two lanes take four sums each to one block.
  const int half = lane & 1, to = lane >> 1;
  uint32_t some[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) some[i] = __shfl_sync(kAll, sum, 16 * half + 4 * i);
  const uint32_t address = shared_address(&shared.sums[round][rank][8 * warp + 4 * half]);
  if (to < SPLIT) {
    const uint4 v = make_uint4(some[0], some[1], some[2], some[3]);
    if (SPLIT > 1) {
      send_remote(remote_address(address, to), v, remote_address(shared_address(&shared.arrived[round]), to));
    } else {
      store_shared(address, v.x, v.y, v.z, v.w);
    }
  }
  __syncwarp();
}

// One warp: the bin of the `need`-th key from above.
template <int SPLIT>
__device__ __forceinline__ Found find_bin(ClusterShared& shared, int round, int rank, int need) {
  const int lane = threadIdx.x % 32;
  // A lane's sums, and those of the blocks before this one; the greatest bins come first.
  int sums[4] = {}, sums_before[4] = {};
#pragma unroll 8
  for (int from = 0; from < SPLIT; ++from) {
    const uint4 v = *reinterpret_cast<const uint4*>(&shared.sums[round][from][kSums - 4 - 4 * lane]);
    const uint32_t some[4] = {v.w, v.z, v.y, v.x};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] += some[i];
      if (from < rank) sums_before[i] += some[i];
    }
  }
  const int mine = sums[0] + sums[1] + sums[2] + sums[3];
  const int mine_before = sums_before[0] + sums_before[1] + sums_before[2] + sums_before[3];
  const int upto = inclusive_sum(mine, lane);
  const uint32_t reached = __ballot_sync(kAll, upto >= need);
  if (reached == 0) {
    return {-1, __shfl_sync(kAll, upto, 31), __reduce_add_sync(kAll, mine_before), 0, 0};
  }
  const int holder = __ffs(reached) - 1;
  int above = upto - mine, some_before = 0, passed = 0;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (passed == i && above + sums[i] < need) above += sums[i], some_before += sums_before[i], ++passed;
  }
  int above_before = lane < holder ? mine_before : lane == holder ? some_before : 0;
  const int sum = __shfl_sync(kAll, kSums - 1 - 4 * lane - passed, holder);
  above = __shfl_sync(kAll, above, holder);

  const int bin = sum * kFine + kFine - 1 - lane;
  const uint32_t address = shared_address(&shared.counts[round][bin]);
  int count = 0, count_before = 0;
#pragma unroll 8
  for (int from = 0; from < SPLIT; ++from) {
    const int some = SPLIT == 1 ? shared.counts[round][bin] : load_remote_word(remote_address(address, from));
    count += some;
    if (from < rank) count_before += some;
  }
  const int counts = inclusive_sum(count, lane);
  const int exact = __ffs(__ballot_sync(kAll, above + counts >= need)) - 1;
  if (lane < exact) above_before += count_before;
  return {__shfl_sync(kAll, bin, exact), above + __shfl_sync(kAll, counts - count, exact),
          __reduce_add_sync(kAll, above_before), __shfl_sync(kAll, count, exact),
          __shfl_sync(kAll, count_before, exact)};
}

// What this block keeps of the row's k best. Blocks are on their way to a meeting when this begins, so that none is
// sent to before it is there, and when it ends, so that none leaves while it is read. `meanwhile` is called once, while
// the first sums are on their way.
template <int SPLIT, int VECTORS, class Meanwhile>
__device__ __forceinline__ Share find_share(ClusterShared& shared, const uint32_t (&keys)[VECTORS][kVector],
                                            int vectors, int k, int rank, Meanwhile meanwhile) {
  uint32_t prefix = 0, known = 0;  // bits of the k-th key
  int need = k, above_before = 0, shift = 32 - kDigitBits;
  Share share = {};
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      if (j < vectors) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const uint32_t key = keys[j][i];
          if (key != 0 && (key & known) == prefix) {
            atomicAdd(&shared.counts[round][key >> shift & (kDigits - 1)], 1);
          }
        }
      }
    }
    __syncthreads();
    if (round == 0 && SPLIT > 1) cluster_wait();
    send_sums<SPLIT>(shared, round, rank);
    if (round == 0) meanwhile();
    if (SPLIT == 1) __syncthreads();
    if (threadIdx.x < 32) {
      if (SPLIT > 1) mbarrier_wait_cluster(shared_address(&shared.arrived[round]), 0);
      const Found found = find_bin<SPLIT>(shared, round, rank, need);
      if (threadIdx.x == 0) shared.found = found;
    }
    __syncthreads();
    const Found found = shared.found;
    above_before += found.above_before;
    if (found.bin < 0) {
      share = {0, 0, above_before, 0, found.above};
      break;
    }
    need -= found.above;
    prefix |= static_cast<uint32_t>(found.bin) << shift;
    known = kAll << shift;
    if (found.inside == need) {
      share = {prefix - 1, 0, above_before + found.inside_before, 0, k};  // no key is in the bin of 0
      break;
    }
    share = {prefix, need, above_before, found.inside_before, k};
    // The last digit has bits of the one before it, which its keys agree on.
    shift = max(shift - kDigitBits, 0);
  }
  if (SPLIT > 1) cluster_arrive();
  return share;
}

// Calls emit(place, vector, element) for each key that the block keeps, places ascending with the key's position.
template <int VECTORS, class Emit>
__device__ __forceinline__ void keep(ClusterShared& shared, const uint32_t (&keys)[VECTORS][kVector], int vectors,
                                     const Share& share, Emit emit) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t counts[VECTORS], all = 0;  // above the limit, and at it from bit 16 on
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    counts[j] = 0;
    if (j < vectors) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        counts[j] += (keys[j][i] > share.key) + (keys[j][i] == share.key) * (1u << 16);
      }
    }
    all += counts[j];
  }
  all = __reduce_add_sync(kAll, all);
  if (lane == 0) shared.kept[warp] = all;
  __syncthreads();
  const uint32_t before = __reduce_add_sync(kAll, lane < warp ? shared.kept[lane] : 0u);
  int above = share.above_before + (before & 0xFFFF), tied = share.ties_before + (before >> 16);
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    if (j < vectors) {
      const uint32_t upto = inclusive_sum(counts[j], lane), of_lanes_before = upto - counts[j];
      int my_above = above + (of_lanes_before & 0xFFFF), my_tied = tied + (of_lanes_before >> 16);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const bool is_above = keys[j][i] > share.key, is_tied = keys[j][i] == share.key;
        if (is_above || (is_tied && my_tied < share.ties)) emit(my_above + min(my_tied, share.ties), j, i);
        my_above += is_above, my_tied += is_tied;
      }
      const uint32_t of_warp = __shfl_sync(kAll, upto, 31);
      above += of_warp & 0xFFFF, tied += of_warp >> 16;
    }
  }
}

// ---- Kernels

template <int SPLIT, int VECTORS>
__global__ void __launch_bounds__(kClusterThreads, 2) best_in_cluster_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<ClusterShared*>(memory);
  const Place at = place_of<SPLIT>();
  let_next_kernel_start();
  wait_for_kernels_before();
  const int visible = load_int(p.visible, at.row, p.visible_wide);
  const float* maxima = p.scores + at.row * p.width;
  float4 scores[VECTORS];
  const auto load = [&](int base, int vectors, int end) {
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const int index = base + j * kWarpStep;
      scores[j] = {nan(), nan(), nan(), nan()};
      if (j < vectors && index < end) scores[j] = load_global(reinterpret_cast<const float4*>(maxima + index));
    }
  };
  // Short rows are fetched before their length is known, and what lies past it is dropped. Of long ones each block
  // takes its share of what is there.
  constexpr bool kShort = VECTORS <= 2;
  int vectors = vectors_for<SPLIT>(p.width), base = first_score(at.rank, vectors);
  if (kShort) load(base, vectors, p.width);
  prepare<SPLIT>(shared);  // while the length is on its way
  const int seen = min((visible + kGroup - 1) / kGroup, p.width);
  int* chosen = p.chosen + at.row * p.k;
  if (seen <= p.k) {
    for (int i = at.first; i < p.k; i += SPLIT * kClusterThreads) chosen[i] = i < seen ? i : -1;
    return;
  }
  if (!kShort) {
    vectors = vectors_for<SPLIT>(seen), base = first_score(at.rank, vectors);
    load(base, vectors, seen);
  }
  open_to_others<SPLIT>(shared);

  // The newest block is greater than every other.
  const int newest = p.keep_newest ? seen - 1 : -1;
  uint32_t keys[VECTORS][kVector];
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    const float some[kVector] = {scores[j].x, scores[j].y, scores[j].z, scores[j].w};
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int index = base + j * kWarpStep + i;
      keys[j][i] = index >= seen ? 0 : index == newest ? kForced : ordered(some[i]);
    }
  }
  const Share share = find_share<SPLIT>(shared, keys, vectors, p.k, at.rank, [] {});
  keep(shared, keys, vectors, share, [&](int place, int j, int i) { chosen[place] = base + j * kWarpStep + i; });
  for (int i = share.number + at.first; i < p.k; i += SPLIT * kClusterThreads) chosen[i] = -1;
  __syncwarp();
  if (SPLIT > 1) cluster_wait();
}

template <int SPLIT, int VECTORS>
__global__ void __launch_bounds__(kClusterThreads, VECTORS < kMaxVectors ? 2 : 1)
    select_in_cluster_kernel(const __grid_constant__ Params p) {
  // Tokens of all entries are asked for before any is chosen, where a thread has few: their latency passes unseen.
  constexpr bool kAhead = VECTORS <= 2;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<ClusterShared*>(memory);
  const Place at = place_of<SPLIT>();
  let_next_kernel_start();
  wait_for_kernels_before();
  // All loads but those of tokens start at once.
  const bool wants_slots = p.slots != nullptr;
  const int visible = load_int(p.visible, at.row, p.visible_wide);
  const int request = wants_slots ? load_int(p.requests, at.row, p.requests_wide) : 0;
  const int vectors = vectors_for<SPLIT>(p.width), base = first_score(at.rank, vectors);
  const int* listed = p.blocks + at.row * (p.width / kGroup);
  const float* row_scores = p.scores + at.row * p.width;
  int positions[VECTORS];  // of a vector's first entry, or less than 0
  float4 scores[VECTORS];
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    const int index = base + j * kWarpStep;
    positions[j] = -1, scores[j] = {};
    if (j < vectors && index < p.width) {
      positions[j] = load_global(listed + index / kGroup);
      scores[j] = load_global(reinterpret_cast<const float4*>(row_scores + index));
    }
  }
  prepare<SPLIT>(shared);
  int* chosen = p.chosen + at.row * p.k;
  int64_t* slots = p.slots + at.row * p.k;
  const int* tokens = static_cast<const int*>(p.req_to_token) + (request * p.request_stride << p.req_to_token_wide);
  const int words = 1 << (p.ratio_shift + p.req_to_token_wide);  // from entry to entry
  const auto token_of = [&](int position) { return load_global(tokens + position * words); };
  if (visible <= min(p.k, p.width)) {
    for (int i = at.first; i < p.k; i += SPLIT * kClusterThreads) {
      chosen[i] = i < visible ? i : -1;
      if (wants_slots) slots[i] = i < visible ? token_of(i) >> p.ratio_shift : -1;
    }
    return;
  }
  open_to_others<SPLIT>(shared);

  uint32_t keys[VECTORS][kVector];
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    const float some[kVector] = {scores[j].x, scores[j].y, scores[j].z, scores[j].w};
    const int listed_block = positions[j];
    positions[j] = listed_block * kGroup + (base + j * kWarpStep & (kGroup - 1));
    const int there = listed_block < 0 ? 0 : visible - positions[j];  // of its entries, if not more
#pragma unroll
    for (int i = 0; i < kVector; ++i) keys[j][i] = i < there ? ordered(some[i]) : 0;
  }
  int ahead[kAhead ? VECTORS : 1][kVector] = {};  // tokens as they are loaded: nothing waits for them yet
  const Share share = find_share<SPLIT>(shared, keys, vectors, p.k, at.rank, [&] {
    if constexpr (kAhead) {
#pragma unroll
      for (int j = 0; j < VECTORS; ++j) {
        const int* first = tokens + positions[j] * words;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (wants_slots && keys[j][i] != 0) ahead[j][i] = load_global(first + i * words);
        }
      }
    }
  });
  keep(shared, keys, vectors, share, [&](int place, int j, int i) {
    chosen[place] = positions[j] + i;
    if (!wants_slots) return;
    if constexpr (kAhead) {
      slots[place] = ahead[j][i] >> p.ratio_shift;
    } else {
      slots[place] = token_of(positions[j] + i) >> p.ratio_shift;
    }
  });
  for (int i = share.number + at.first; i < p.k; i += SPLIT * kClusterThreads) {
    chosen[i] = -1;
    if (wants_slots) slots[i] = -1;
  }
  __syncwarp();
  if (SPLIT > 1) cluster_wait();
}

}  // namespace
