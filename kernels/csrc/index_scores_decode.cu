// Index scores of decode rows over paged packed keys on Hopper (sm_90a): the maxima of a scan, and the scores of listed
// blocks. The contract is in cuda_index_decode.py.
//
// Work. A tile is 64 keys: a page of a scan, or eight listed blocks of 8. A scan's rows come in sets of `group` rows of
// one request, which share its tiles; otherwise a set is one row. The tiles of all sets, in order and without those of
// sets that need no scores, are shared out evenly over the teams of the card. A team is a warpgroup that scores tiles
// and a warp that serves it; each team counts the tiles for itself from the lengths on the device, then works alone.
//
// Server. A page's keys lie together (64 * 64 bytes of data, then 64 * 4 of scales), so a bulk copy brings a page, and
// two bring a block. Copies run up to `kStages` tiles ahead in a ring of the team's own; the slots of the next tiles
// are looked up by all lanes at once. When a tile's scores are there, the server makes out which keys exist, takes the
// maxima and writes everything: scorers know of neither lengths nor addresses.
//
// Scorer. wgmma with 64 keys as M, 32 heads as N. Keys are decoded straight into the registers of the A operand: a lane
// takes 16 bytes of a key, dims 32 * (lane % 4) on, which have one scale. That fixes the order of dims along K, in
// which the queries, the B operand, lie in shared memory (index_scores_prefill.cu has the same):
//
//     step s, position k:   dim 32 * (k % 8 / 2) + 8 * (s / 2) + 2 * (s % 2) + k / 8 + 4 * (k % 2)
//
// A row's queries stay from tile to tile. A set's rows are multiplied in turn, with the same registers of keys.
//
// Scale. Decoded keys carry a factor 2^-16 (records.cuh), the relu below one of 2; weights carry 2^15. All are exact.
// A key's score depends on that key and its row alone, lanes being added in one order: scan and list, and every size of
// set, give the same bits.
//
// Predicted, not measured: a tile is about 215 instructions of each scoring warp and 100 of its server, that is 240
// issue slots of a scheduler, which has four scoring warps and a server to fill them. The tensor core needs 128 cycles
// or more, the tile's bytes 235 at 4.3 TB/s and 132 multiprocessors.

#include <cstddef>

#include "launch.cuh"
#include "records.cuh"

namespace {

constexpr int kDims = 128;
constexpr int kHeads = 32;  // fewer are padded with zeros
constexpr int kSteps = kDims / 16;
constexpr int kTileKeys = 64;
constexpr int kBlockKeys = 8;
constexpr int kBlocks = kTileKeys / kBlockKeys;
constexpr int kKeyBytes = 64;    // 128 e2m1
constexpr int kScaleBytes = 4;   // ue8m0, one per 32 dims
constexpr int kScalesAt = kTileKeys * kKeyBytes;  // in a page as in a tile
constexpr int kTileBytes = kTileKeys * (kKeyBytes + kScaleBytes);
constexpr int kPanelBytes = kHeads * 128;  // 64 dims of every head
constexpr int kQueryBytes = 2 * kPanelBytes;
constexpr int kMaxGroup = 6;
constexpr float kUnshift = 32768.0f;
constexpr uint32_t kAll = 0xFFFFFFFFu;

// What fits a multiprocessor when sets have up to GROUP rows.
template <int GROUP>
constexpr int kTeams = GROUP == 1 ? 4 : 3;
template <int GROUP>
constexpr int kStages = GROUP == 1 ? 6 : 4;
template <int GROUP>
constexpr int kThreads = kTeams<GROUP> * (128 + 32);  // scorers first
constexpr int kWordsAtOnce = 2;  // of a lane's 4 words of a key that are decoded before their products start: 1, 2, 4

struct Params {
  const __nv_bfloat16* q;        // [rows, heads, 128] contiguous
  const __nv_bfloat16* weights;  // [rows, heads] contiguous
  const uint8_t* cache;          // [pages, 64 * 64 data | 64 * 4 scales], page_stride bytes apart
  int64_t page_stride;
  const void* req_to_token;  // [requests, context], row stride request_stride
  int64_t request_stride;
  const void* requests;  // [rows]
  const void* visible;   // [rows]
  int req_to_token_wide, requests_wide, visible_wide;  // int64, otherwise int32
  int ratio_shift;       // entry j is token j << ratio_shift
  int rows, heads, skip;
  int group, sets;    // rows of a set; a list's is one row
  int width;          // of a scan
  const int* blocks;  // [rows, num_blocks] of a list
  int num_blocks;
  float* scores;     // list: [rows, num_blocks * 8]
  float* block_max;  // [rows, width / 8] or [rows, num_blocks]
  float* tile_max;   // scan: [rows, width / 64]
};

struct Tile {
  int set, place;  // place: the tile within its set
  int keys;        // scan: of the set, 1 to 64
};

template <int GROUP>
struct alignas(128) Stage {
  uint8_t keys[kTileBytes];
  float scores[GROUP][kTileKeys];
  Tile tile;
  int present[kBlocks];  // list: keys of each block, 0 to 8
  uint64_t full, done;
};

template <int GROUP>
struct alignas(1024) Shared {
  static constexpr int T = kTeams<GROUP>, S = kStages<GROUP>;
  uint8_t q[T][GROUP][kQueryBytes];
  Stage<GROUP> stages[T][S];
  float weights[T][GROUP][kHeads];  // as lanes hold columns: [lane % 4][4][2]
};

// ---- Which tiles ----------------------------------------------------------------------------------------------------

// What a row sees if it needs scores, otherwise 0.
template <bool LISTED>
__device__ __forceinline__ int row_visible(const Params& p, int64_t row) {
  int visible = load_int(p.visible, row, p.visible_wide);
  if (!LISTED) visible = min(visible, p.width);
  return visible > p.skip ? max(visible, 0) : 0;
}

// What the rows of a set see, and the tiles that they need.
template <bool LISTED, int GROUP>
__device__ __forceinline__ int set_tiles(const Params& p, int set, int& visible) {
  const int64_t row = static_cast<int64_t>(set) * (GROUP == 1 ? 1 : p.group);
  if (LISTED) {
    visible = load_int(p.visible, row, p.visible_wide);
    return visible > p.skip ? (p.num_blocks + kBlocks - 1) / kBlocks : 0;
  }
  visible = row_visible<LISTED>(p, row);
  if (GROUP > 1) {
    for (int r = 1; r < p.group; ++r) visible = max(visible, row_visible<LISTED>(p, row + r));
  }
  return (visible + kTileKeys - 1) / kTileKeys;
}

__device__ __forceinline__ int sum_upto(int value, int lane) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(kAll, value, by);
    if (lane >= by) value += other;
  }
  return value;
}

// A team's tiles, first .. last - 1 of all; the set of the first, and that set's first.
struct Share {
  int first, last, set, set_start;
};

template <bool LISTED, int GROUP>
__device__ __forceinline__ Share share_of(const Params& p, int team, int teams, int lane) {
  int visible;
  int mine = lane < p.sets ? set_tiles<LISTED, GROUP>(p, lane, visible) : 0;
  int upto = sum_upto(mine, lane), tiles = __shfl_sync(kAll, upto, 31);
  if (p.sets > 32) {
    int more = 0;
#pragma unroll 4
    for (int set = lane + 32; set < p.sets; set += 32) more += set_tiles<LISTED, GROUP>(p, set, visible);
    tiles += __reduce_add_sync(kAll, more);
  }
  const uint32_t each = static_cast<uint32_t>(tiles) / teams, rest = tiles - each * teams;
  Share share = {};
  share.first = each * team + min(team, static_cast<int>(rest));
  share.last = share.first + each + (team < static_cast<int>(rest));
  if (share.first == share.last) return share;
  for (int base = 0, before = 0;; base += 32) {
    const uint32_t past = __ballot_sync(kAll, before + upto > share.first);
    if (past) {
      const int at = __ffs(past) - 1;
      share.set = base + at, share.set_start = before + __shfl_sync(kAll, upto - mine, at);
      return share;
    }
    before += __shfl_sync(kAll, upto, 31);
    const int next = base + 32 + lane;
    mine = next < p.sets ? set_tiles<LISTED, GROUP>(p, next, visible) : 0;
    upto = sum_upto(mine, lane);
  }
}

// ---- Server ---------------------------------------------------------------------------------------------------------

// Every lane looks up one copy of the next tiles: a page, or a block of which eight make a tile.
template <bool LISTED, int GROUP>
struct Server {
  static constexpr int S = kStages<GROUP>;
  static constexpr int kCopies = LISTED ? kBlocks : 1;  // of a tile
  static constexpr int kBatch = 32 / kCopies;           // tiles looked up at once
  const Params& params;
  Stage<GROUP>* const stages;  // the team's
  const int lane, first, last;
  const int early_request;  // of row `lane`
  int next, batch_end;
  int set, set_start;  // at or before the next batch's first tile
  // Of this lane's copy.
  int copy_set, copy_place, keys;
  const uint8_t* data;
  const uint8_t* scales;

  __device__ __forceinline__ Server(const Params& p, Stage<GROUP>* stages, const Share& share, int early_request,
                                    int lane)
      : params(p), stages(stages), lane(lane), first(share.first), last(share.last), early_request(early_request),
        next(share.first), batch_end(share.first), set(share.set), set_start(share.set_start) {}

  __device__ __forceinline__ void look_up() {
    const int index = next + lane / kCopies;
    keys = 0, copy_set = set, copy_place = 0;
    data = scales = params.cache;
    int start = set_start, visible = 0, entry = 0;
    if (index < last) {
      for (int tiles; index - start >= (tiles = set_tiles<LISTED, GROUP>(params, copy_set, visible)); ++copy_set) {
        start += tiles;
      }
      copy_place = index - start;
      if (LISTED) {
        const int column = copy_place * kBlocks + lane % kBlocks;
        const int64_t line = static_cast<int64_t>(copy_set) * params.num_blocks;
        const int block = column < params.num_blocks ? load_global(params.blocks + line + column) : -1;
        entry = block * kBlockKeys;
        if (block >= 0) keys = max(0, min(kBlockKeys, visible - entry));
      } else {
        entry = copy_place * kTileKeys;
        keys = min(kTileKeys, visible - entry);
      }
    }
    const int64_t row = static_cast<int64_t>(copy_set) * (GROUP == 1 ? 1 : params.group);
    int request = __shfl_sync(kAll, early_request, static_cast<int>(row) & 31);
    if (keys) {
      if (row >= 32) request = load_int(params.requests, row, params.requests_wide);
      const int64_t token = request * params.request_stride + (static_cast<int64_t>(entry) << params.ratio_shift);
      const int slot = load_int(params.req_to_token, token, params.req_to_token_wide) >> params.ratio_shift;
      const uint8_t* page = params.cache + (slot / kTileKeys) * params.page_stride;
      data = page + slot % kTileKeys * kKeyBytes;
      scales = page + kScalesAt + slot % kTileKeys * kScaleBytes;
    }
    // The last lane's set is the furthest.
    const int end = min(last, next + kBatch) - 1 - next;
    set = __shfl_sync(kAll, copy_set, end * kCopies), set_start = __shfl_sync(kAll, start, end * kCopies);
    batch_end = next + kBatch;
  }

  // Starts the next tile's copies into a stage whose keys and scores have been used.
  __device__ __forceinline__ void issue(Stage<GROUP>& stage) {
    if (next == batch_end) look_up();
    const int from = (next - (batch_end - kBatch)) * kCopies;
    const bool mine = lane >= from && lane < from + kCopies;
    // Scales of up to three keys past the last one come along: copies are multiples of 16 bytes.
    const int data_bytes = keys * kKeyBytes, scale_bytes = (keys * kScaleBytes + 15) / 16 * 16;
    const uint32_t target = shared_address(stage.keys), barrier = shared_address(&stage.full);
    // Each lane has read what is written over; see mbarrier_arrive_warp.
    if (kWarpArrivals > 1 && lane != from) mbarrier_arrive(barrier);
    if (lane == from) stage.tile = {copy_set, copy_place, keys};
    if (LISTED) {
      const int bytes = __reduce_add_sync(kAll, mine ? data_bytes + scale_bytes : 0);
      if (mine) stage.present[lane % kBlocks] = keys;
      __syncwarp();
      if (lane == from) mbarrier_expect(barrier, bytes);
      __syncwarp();
      if (mine && keys) {
        const int at = lane % kBlocks * kBlockKeys;
        bulk_copy(target + at * kKeyBytes, data, data_bytes, barrier);
        bulk_copy(target + kScalesAt + at * kScaleBytes, scales, scale_bytes, barrier);
      }
    } else if (mine) {
      mbarrier_expect(barrier, data_bytes + scale_bytes);
      if (keys == kTileKeys) {
        bulk_copy(target, data, kTileBytes, barrier);
      } else {
        bulk_copy(target, data, data_bytes, barrier);
        bulk_copy(target + kScalesAt, scales, scale_bytes, barrier);
      }
    }
    ++next;
  }

  // Writes what is asked of a tile whose scores are there. A lane has keys 2 * lane and the next.
  __device__ __forceinline__ void write(const Stage<GROUP>& stage) const {
    const Tile tile = stage.tile;
    const int64_t row = static_cast<int64_t>(tile.set) * (GROUP == 1 ? 1 : params.group);
    const int column = tile.place * kBlocks + lane / 4, rows = GROUP == 1 ? 1 : params.group;
    int seen = 0;
    if (GROUP > 1 && lane < rows) seen = row_visible<false>(params, row + lane) - tile.place * kTileKeys;
    for (int r = 0; r < rows; ++r) {
      float2 scores = reinterpret_cast<const float2*>(stage.scores[r])[lane];
      int present;  // of this lane's block
      if (LISTED) {
        present = stage.present[lane / 4];
      } else {
        present = (GROUP == 1 ? tile.keys : __shfl_sync(kAll, seen, r)) - lane / 4 * kBlockKeys;
      }
      const int key = lane % 4 * 2;
      if (key >= present) scores.x = -INFINITY;
      if (key + 1 >= present) scores.y = -INFINITY;
      float top = fmaxf(scores.x, scores.y);
      top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
      if (LISTED) {
        if (column < params.num_blocks) {
          const int64_t block = row * params.num_blocks + column;
          *reinterpret_cast<float2*>(params.scores + block * kBlockKeys + key) = scores;
          if (key == 0) params.block_max[block] = top;
        }
      } else {
        if (key == 0 && present > 0) params.block_max[(row + r) * (params.width / kBlockKeys) + column] = top;
        top = fmaxf(top, __shfl_xor_sync(kAll, top, 4));
        top = fmaxf(top, __shfl_xor_sync(kAll, top, 8));
        top = fmaxf(top, __shfl_xor_sync(kAll, top, 16));
        if (lane == 0 && present > 0) params.tile_max[(row + r) * (params.width / kTileKeys) + tile.place] = top;
      }
    }
  }

  __device__ __forceinline__ void serve() {
    for (int s = 0; s < S && first + s < last; ++s) issue(stages[s]);
    Stage<GROUP>* stage = stages;
    for (int i = first, phase = 0; i < last; ++i) {
      mbarrier_wait(shared_address(&stage->done), phase);
      write(*stage);
      __syncwarp();  // every lane is through with the stage
      if (next < last) issue(*stage);
      if (++stage == stages + S) stage = stages, phase ^= 1;
    }
  }
};

// ---- Scorer ---------------------------------------------------------------------------------------------------------

template <int GROUP>
struct Scorer {
  static constexpr int S = kStages<GROUP>;
  static constexpr int kStageBytes = sizeof(Stage<GROUP>), kScoresAt = offsetof(Stage<GROUP>, scores);
  const Params& params;
  Shared<GROUP>& shared;
  const int team, warp, lane;  // warp: within the team

  // A set's queries and weights, in shared memory once the team has met. A thread takes dims 8 * word to 8 * word + 7
  // of every 32 of a head, which are four chunks of 16 bytes.
  __device__ __forceinline__ void load_queries(int set) const {
    const int thread = warp * 32 + lane, head = thread / 4, word = thread % 4;
    const int rows = GROUP == 1 ? 1 : params.group;
    for (int r = 0; r < rows; ++r) {
      const int64_t line = (static_cast<int64_t>(set) * rows + r) * params.heads;
      uint4 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4* source = reinterpret_cast<const uint4*>(params.q + (line + head) * kDims + 32 * i + 8 * word);
        v[i] = head < params.heads ? load_global(source) : make_uint4(0, 0, 0, 0);
      }
      if (warp == 0) {
        const int column = lane / 2 % 4 * 8 + lane / 8 * 2 + lane % 2;
        const uint16_t* bits = reinterpret_cast<const uint16_t*>(params.weights + line + column);
        const float weight = column < params.heads ? __uint_as_float(uint32_t{load_global(bits)} << 16) * kUnshift : 0.0f;
        shared.weights[team][r][lane] = weight;
      }
      const uint32_t target = shared_address(shared.q[team][r]) + word / 2 * kPanelBytes + head * 128;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t selector = i % 2 ? 0x7632 : 0x5410;
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[j] = i < 2 ? prmt(v[j].x, v[j].z, selector) : prmt(v[j].y, v[j].w, selector);
        store_shared(target + ((word % 2 * 4 + i) ^ (head % 8)) * 16, pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
    fence_async();
    meet();
  }

  __device__ __forceinline__ void meet() const { barrier_sync(1 + team, 128); }

  // A lane's of columns 8 * n + 2 * (lane % 4) and the next.
  struct Weights {
    float4 of[2];
  };

  __device__ __forceinline__ Weights weights(int r) const {
    const uint32_t own = shared_address(shared.weights[team][r]) + lane % 4 * 32;
    return {load_shared_floats(own), load_shared_floats(own + 16)};
  }

  __device__ __forceinline__ uint64_t queries(int r) const { return descriptor(shared_address(shared.q[team][r])); }

  // Where a lane finds and leaves things in a stage.
  struct Places {
    uint32_t data, scales, score, upper;

    // In registers, rather than computed again for every tile.
    __device__ __forceinline__ Places(int warp, int lane)
        : data(here((warp * 16 + lane / 4) * kKeyBytes + lane % 4 * 16)),
          scales(here(kScalesAt + (warp * 16 + lane / 4) * kScaleBytes + lane % 4)),
          score(here(kScoresAt + (warp * 16 + lane % 4 / 2 * 8 + lane / 4) * 4)),
          upper(here(lane & 2)) {}
  };

  __device__ __forceinline__ static void multiply(float (&d)[16], const uint32_t (&a)[4], uint64_t q, int step) {
    wgmma_registers(d, a, q + ((step / 4 * kPanelBytes + step % 4 * 32) >> 4), step > 0);
  }

  // Scores of a product's 64 keys. A lane has its columns of the warp's keys lane / 4 and the eighth after; it ends
  // with one of these keys. Sums of lanes: (0 + 2) + (1 + 3), in either order.
  __device__ __forceinline__ static void weigh(const float (&d)[16], const Weights& weights, const Places& places,
                                               uint32_t target) {
    float low = 0, high = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float4 w = weights.of[n / 2];
      const float w0 = n % 2 ? w.z : w.x, w1 = n % 2 ? w.w : w.y;
      // x + |x| is twice the relu, in the pipe that integers leave free.
      low = fmaf(d[4 * n] + fabsf(d[4 * n]), w0, low);
      low = fmaf(d[4 * n + 1] + fabsf(d[4 * n + 1]), w1, low);
      high = fmaf(d[4 * n + 2] + fabsf(d[4 * n + 2]), w0, high);
      high = fmaf(d[4 * n + 3] + fabsf(d[4 * n + 3]), w1, high);
    }
    float score = (places.upper ? high : low) + __shfl_xor_sync(kAll, places.upper ? low : high, 2);
    score += __shfl_xor_sync(kAll, score, 1);
    // Twice the same, which spares a choice of lanes.
    store_shared(target, __float_as_uint(score));
  }

  // `first`: weights of the set's first row.
  __device__ __forceinline__ void score(uint32_t stage, const Weights& first, const Places& places, uint64_t q) const {
    const uint32_t data = stage + places.data, scales = stage + places.scales;
    const uint4 v0 = load_shared(data), v1 = load_shared(data + 8 * kKeyBytes);
    const uint32_t scale0 = ue8m0_scale_e2m1(load_shared_byte(scales));
    const uint32_t scale1 = ue8m0_scale_e2m1(load_shared_byte(scales + 8 * kScaleBytes));
    const uint32_t words0[4] = {v0.x, v0.y, v0.z, v0.w}, words1[4] = {v1.x, v1.y, v1.z, v1.w};
    uint32_t a[kSteps][4];
    float d[16];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t pairs0[4], pairs1[4];
      decode_e2m1(words0[w], scale0, pairs0);
      decode_e2m1(words1[w], scale1, pairs1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[2 * w + i / 2][i % 2 * 2] = pairs0[i];
        a[2 * w + i / 2][i % 2 * 2 + 1] = pairs1[i];
      }
      if ((w + 1) % kWordsAtOnce == 0) {
        wgmma_fence();
#pragma unroll
        for (int s = 2 * (w + 1 - kWordsAtOnce); s < 2 * (w + 1); ++s) multiply(d, a[s], q, s);
      }
    }
    wgmma_commit();
    wgmma_wait_for<0>(d);
    weigh(d, first, places, stage + places.score);
    if (GROUP > 1) {
      for (int r = 1; r < params.group; ++r) {
        const uint64_t q = queries(r);
        float d[16];
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) multiply(d, a[s], q, s);
        wgmma_commit();
        wgmma_wait_for<0>(d);
        weigh(d, weights(r), places, stage + places.score + r * kTileKeys * 4);
      }
    }
  }

  __device__ __forceinline__ void run(int count, int set) const {
    load_queries(set);
    const Places places(warp, lane);
    const uint64_t q = queries(0);
    Weights first = weights(0);
    const uint32_t ring = shared_address(shared.stages[team]), end = ring + S * kStageBytes;
    uint32_t stage = ring;
    for (int phase = 0;;) {
      mbarrier_wait(stage + offsetof(Stage<GROUP>, full), phase);
      const int own = load_shared_word(stage + offsetof(Stage<GROUP>, tile.set));
      if (own != set) {
        set = own;
        meet();  // the team is through with the queries before
        load_queries(set);
        first = weights(0);
      }
      score(stage, first, places, q);
      mbarrier_arrive_warp(stage + offsetof(Stage<GROUP>, done), lane);
      if (--count == 0) break;
      if ((stage += kStageBytes) == end) stage = ring, phase ^= 1;
    }
  }
};

// ---- Kernel ---------------------------------------------------------------------------------------------------------

template <bool LISTED, int GROUP>
__global__ void __launch_bounds__(kThreads<GROUP>, 1) index_scores_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<GROUP>*>(memory);
  constexpr int T = kTeams<GROUP>, S = kStages<GROUP>;
  const int warp = __shfl_sync(kAll, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const bool serves = warp >= 4 * T;
  const int team = serves ? warp - 4 * T : warp / 4;
  if (serves && lane == 0) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      mbarrier_init(shared_address(&shared.stages[team][s].full), kWarpArrivals);
      mbarrier_init(shared_address(&shared.stages[team][s].done), 4 * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  let_next_kernel_start();
  wait_for_kernels_before();

  // Requests are fetched beside the lengths, not after them.
  const int early_request = serves && lane < params.rows ? load_int(params.requests, lane, params.requests_wide) : 0;
  // Teams of one block lie a grid apart, so that few tiles spread over all multiprocessors.
  const Share share = share_of<LISTED, GROUP>(params, team * gridDim.x + blockIdx.x, T * gridDim.x, lane);
  __syncthreads();
  if (share.first == share.last) return;
  if (serves) {
    Server<LISTED, GROUP>(params, shared.stages[team], share, early_request, lane).serve();
  } else {
    Scorer<GROUP>{params, shared, team, warp % 4, lane}.run(share.last - share.first, share.set);
  }
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <bool LISTED, int GROUP>
cudaError_t launch(const Params& params, int blocks, bool early, cudaStream_t stream) {
  constexpr int threads = kThreads<GROUP>, bytes = sizeof(Shared<GROUP>);
  return launch_kernel(index_scores_kernel<LISTED, GROUP>, params, blocks, threads, bytes, early, stream);
}

// ---- Interface ------------------------------------------------------------------------------------------------------

Params params_of(const void* q, const void* weights, const void* cache, int64_t page_stride, const void* req_to_token,
                 int64_t request_stride, int req_to_token_wide, const void* requests, int requests_wide,
                 const void* visible, int visible_wide, int ratio, int rows, int heads, int skip) {
  Params p = {};
  p.q = static_cast<const __nv_bfloat16*>(q), p.weights = static_cast<const __nv_bfloat16*>(weights);
  p.cache = static_cast<const uint8_t*>(cache), p.page_stride = page_stride;
  p.req_to_token = req_to_token, p.request_stride = request_stride, p.req_to_token_wide = req_to_token_wide;
  p.requests = requests, p.requests_wide = requests_wide, p.visible = visible, p.visible_wide = visible_wide;
  p.ratio_shift = ratio - 1, p.rows = rows, p.heads = heads, p.skip = skip;
  p.group = 1, p.sets = rows;
  return p;
}

bool serves(int heads, int ratio, int grid) { return heads <= kHeads && (ratio == 1 || ratio == 2) && grid >= 1; }

}  // namespace

// Return a cudaError_t, 0 for success. `grid`: blocks of the launch, at least 1; any number is right. `group` is 1 to 6
// and divides `rows`.
extern "C" int csa2_block_maxima(const void* q, const void* weights, const void* cache, int64_t page_stride,
                                 const void* req_to_token, int64_t request_stride, int req_to_token_wide,
                                 const void* requests, int requests_wide, const void* visible, int visible_wide,
                                 int ratio, int rows, int heads, int skip, int width, int group, void* block_max,
                                 void* tile_max, int grid, int early, void* stream) {
  if (!serves(heads, ratio, grid) || group < 1 || group > kMaxGroup || rows % group) return cudaErrorInvalidValue;
  Params p = params_of(q, weights, cache, page_stride, req_to_token, request_stride, req_to_token_wide, requests,
                       requests_wide, visible, visible_wide, ratio, rows, heads, skip);
  p.width = width, p.block_max = static_cast<float*>(block_max), p.tile_max = static_cast<float*>(tile_max);
  p.group = group, p.sets = rows / group;
  const auto run = group == 1 ? launch<false, 1> : launch<false, kMaxGroup>;
  return run(p, grid, early, static_cast<cudaStream_t>(stream));
}

extern "C" int csa2_index_scores_candidates(const void* q, const void* weights, const void* cache, int64_t page_stride,
                                            const void* req_to_token, int64_t request_stride, int req_to_token_wide,
                                            const void* requests, int requests_wide, const void* visible,
                                            int visible_wide, int ratio, int rows, int heads, int skip,
                                            const void* blocks, int num_blocks, void* scores, void* block_max,
                                            int grid, int early, void* stream) {
  if (!serves(heads, ratio, grid)) return cudaErrorInvalidValue;
  Params p = params_of(q, weights, cache, page_stride, req_to_token, request_stride, req_to_token_wide, requests,
                       requests_wide, visible, visible_wide, ratio, rows, heads, skip);
  p.blocks = static_cast<const int*>(blocks), p.num_blocks = num_blocks;
  p.scores = static_cast<float*>(scores), p.block_max = static_cast<float*>(block_max);
  return launch<true, 1>(p, grid, early, static_cast<cudaStream_t>(stream));
}
