// Index scores of decode rows over paged packed keys on Hopper (sm_90a): the maxima of a scan, and the scores of listed
// blocks. The contract is in cuda_index_decode.py.
//
// Work. A tile is 64 keys of one row: a page of a scan, or eight listed blocks of 8. The tiles of all rows, in order
// and without those of rows that need no scores, are shared out evenly over the warps of the card. Every warp counts
// them for itself from the lengths on the device, then works alone: no warp waits for another.
//
// Bytes. A page's keys lie together (64 * 64 bytes of data, then 64 * 4 of scales), so a bulk copy brings a page, and
// two bring a block. A warp's copies run `kStages` tiles ahead in a ring of its own in shared memory; the slots of its
// next tiles are looked up by all lanes at once.
//
// Products. mma.sync with 16 keys as M, 8 heads as N: keys are decoded straight into the A operand. The order of dims
// is free as long as keys and queries agree on it, so lane t of a quad takes dims 32 t on, which are 16 bytes of a key
// in one load and have one scale. A row's queries, the B operand, stay in registers (64 of them) from tile to tile.
//
// Order of keys. A quad of lanes holds the 8 keys of one block, as rows g and g + 8 of four steps, so that a block's
// maximum needs no lane outside the quad. Odd quads take the keys of a step in the other order: then the lanes of a
// quarter-warp, two keys of adjacent blocks, meet in no bank.
//
// Scale. Decoded keys carry a factor 2^-16 (records.cuh), the relu below one of 2; weights carry 2^15. All are exact.
// A key's score depends on that key and its row alone: scan and list give the same bits.

#include "launch.cuh"
#include "records.cuh"

namespace {

constexpr int kDims = 128;
constexpr int kHeads = 32;  // fewer are padded with zeros
constexpr int kTileKeys = 64;
constexpr int kBlockKeys = 8;
constexpr int kBlocks = kTileKeys / kBlockKeys;
constexpr int kKeyBytes = 64;    // 128 e2m1
constexpr int kScaleBytes = 4;   // ue8m0, one per 32 dims
constexpr int kScalesAt = kTileKeys * kKeyBytes;  // in a page as in a tile
constexpr int kTileBytes = kTileKeys * (kKeyBytes + kScaleBytes);
constexpr int kWarps = 12;
constexpr int kStages = 3;
constexpr int kThreads = kWarps * 32;
constexpr float kUnshift = 32768.0f;
constexpr uint32_t kAll = 0xFFFFFFFFu;

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
  int width;          // of a scan
  const int* blocks;  // [rows, num_blocks] of a list
  int num_blocks;
  float* scores;     // list: [rows, num_blocks * 8]
  float* block_max;  // [rows, width / 8] or [rows, num_blocks]
  float* tile_max;   // scan: [rows, width / 64]
};

// What a warp must know of a tile when it scores it.
struct Tile {
  int row, place;       // place: the tile within its row
  int present[kBlocks];  // keys of each block, 0 to 8
};

struct alignas(128) Shared {
  uint8_t keys[kWarps][kStages][kTileBytes];
  Tile tiles[kWarps][kStages];
  uint64_t full[kWarps][kStages];
};

// ---- Which tiles ----------------------------------------------------------------------------------------------------

// What a row sees, and the tiles that it needs.
template <bool LISTED>
__device__ __forceinline__ int row_tiles(const Params& p, int row, int& visible) {
  visible = load_int(p.visible, row, p.visible_wide);
  if (!LISTED) visible = min(visible, p.width);
  if (visible <= p.skip) return 0;
  return ((LISTED ? p.num_blocks * kBlockKeys : visible) + kTileKeys - 1) / kTileKeys;
}

template <bool LISTED>
__device__ __forceinline__ int count_tiles(const Params& p, int lane) {
  int sum = 0, visible;
#pragma unroll 4
  for (int row = lane; row < p.rows; row += 32) sum += row_tiles<LISTED>(p, row, visible);
  return __reduce_add_sync(kAll, sum);
}

// The row of tile `index` of all rows' tiles, and that row's first tile; there must be such a tile.
template <bool LISTED>
__device__ __forceinline__ int2 find_row(const Params& p, int index, int lane) {
  int before = 0;
  for (int base = 0;; base += 32) {
    int visible;
    const int mine = base + lane < p.rows ? row_tiles<LISTED>(p, base + lane, visible) : 0;
    int upto = mine;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int other = __shfl_up_sync(kAll, upto, by);
      if (lane >= by) upto += other;
    }
    const uint32_t past = __ballot_sync(kAll, before + upto > index);
    if (past) {
      const int at = __ffs(past) - 1;
      return make_int2(base + at, before + __shfl_sync(kAll, upto - mine, at));
    }
    before += __shfl_sync(kAll, upto, 31);
  }
}

// ---- Copies ---------------------------------------------------------------------------------------------------------

// Brings a warp's tiles first .. last - 1 in, in order. Every lane looks up one copy of the next ones: a page, or a
// block of which eight make a tile.
template <bool LISTED>
struct Feed {
  static constexpr int kCopies = LISTED ? kBlocks : 1;  // of a tile
  static constexpr int kBatch = 32 / kCopies;           // tiles looked up at once
  const Params& params;
  Shared& shared;
  const int warp, lane, last;
  int next, batch_end;
  int row, row_start;  // at or before the next batch's first tile
  // Of this lane's copy.
  int copy_row, copy_place, keys;
  const uint8_t* data;
  const uint8_t* scales;

  __device__ __forceinline__ Feed(const Params& p, Shared& s, int warp, int lane, int first, int last)
      : params(p), shared(s), warp(warp), lane(lane), last(last), next(first), batch_end(first) {
    const int2 found = find_row<LISTED>(p, first, lane);
    row = found.x, row_start = found.y;
  }

  __device__ __forceinline__ void look_up() {
    const int index = next + lane / kCopies;
    keys = 0, copy_row = row, copy_place = 0;
    data = scales = params.cache;
    int start = row_start, visible = 0;
    if (index < last) {
      for (int tiles; index - start >= (tiles = row_tiles<LISTED>(params, copy_row, visible)); ++copy_row) {
        start += tiles;
      }
      copy_place = index - start;
      int entry;
      if (LISTED) {
        const int column = copy_place * kBlocks + lane % kBlocks;
        const int64_t line = static_cast<int64_t>(copy_row) * params.num_blocks;
        const int block = column < params.num_blocks ? __ldg(params.blocks + line + column) : -1;
        entry = block * kBlockKeys;
        if (block >= 0) keys = max(0, min(kBlockKeys, visible - entry));
      } else {
        entry = copy_place * kTileKeys;
        keys = min(kTileKeys, visible - entry);
      }
      if (keys) {
        const int64_t request = load_int(params.requests, copy_row, params.requests_wide);
        const int64_t token = request * params.request_stride + (static_cast<int64_t>(entry) << params.ratio_shift);
        const int slot = load_int(params.req_to_token, token, params.req_to_token_wide) >> params.ratio_shift;
        const uint8_t* page = params.cache + (slot / kTileKeys) * params.page_stride;
        data = page + slot % kTileKeys * kKeyBytes;
        scales = page + kScalesAt + slot % kTileKeys * kScaleBytes;
      }
    }
    // The last lane's row is the furthest.
    const int end = min(last, next + kBatch) - 1 - next;
    row = __shfl_sync(kAll, copy_row, end * kCopies), row_start = __shfl_sync(kAll, start, end * kCopies);
    batch_end = next + kBatch;
  }

  // Starts the next tile's copies into a stage whose keys have been used.
  __device__ __forceinline__ void issue(int stage) {
    if (next == batch_end) look_up();
    const int first = (next - (batch_end - kBatch)) * kCopies;
    const bool mine = lane >= first && lane < first + kCopies;
    // Scales of up to three keys past the last one come along: copies are multiples of 16 bytes.
    const int data_bytes = keys * kKeyBytes, scale_bytes = (keys * kScaleBytes + 15) / 16 * 16;
    const int bytes = __reduce_add_sync(kAll, mine ? data_bytes + scale_bytes : 0);
    Tile& tile = shared.tiles[warp][stage];
    const uint32_t barrier = shared_address(&shared.full[warp][stage]);
    if (mine) {
      if (LISTED) {
        tile.present[lane % kBlocks] = keys;
      } else {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) tile.present[b] = max(0, min(kBlockKeys, keys - b * kBlockKeys));
      }
    }
    if (lane == first) tile.row = copy_row, tile.place = copy_place;
    __syncwarp();
    if (lane == first) mbarrier_expect(barrier, bytes);
    __syncwarp();
    if (mine && keys) {
      const int at = LISTED ? lane % kBlocks * kBlockKeys : 0;
      const uint32_t target = shared_address(shared.keys[warp][stage]);
      bulk_copy(target + at * kKeyBytes, data, data_bytes, barrier);
      bulk_copy(target + kScalesAt + at * kScaleBytes, scales, scale_bytes, barrier);
    }
    ++next;
  }
};

// ---- Scores ---------------------------------------------------------------------------------------------------------

// A row's queries and weights as a lane needs them: quad g's head 8 n + g, and dims 32 t on, in the order in which
// pairs fall out of a key's words; weights of heads 8 n + 2 t and the next.
struct Queries {
  uint32_t q[8][4][2];  // [step of 16 dims][8 heads][half]
  float weights[4][2];

  __device__ __forceinline__ void load(const Params& p, int row, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const int64_t line = static_cast<int64_t>(row) * p.heads;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int head = 8 * n + g;
      const uint4* source = reinterpret_cast<const uint4*>(p.q + (line + head) * kDims + 32 * t);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint4 v = head < p.heads ? __ldg(source + w) : make_uint4(0, 0, 0, 0);
        q[2 * w][n][0] = prmt(v.x, v.z, 0x5410), q[2 * w][n][1] = prmt(v.x, v.z, 0x7632);
        q[2 * w + 1][n][0] = prmt(v.y, v.w, 0x5410), q[2 * w + 1][n][1] = prmt(v.y, v.w, 0x7632);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 8 * n + 2 * t + i;
        const uint16_t* bits = reinterpret_cast<const uint16_t*>(p.weights + line + column);
        weights[n][i] = column < p.heads ? __uint_as_float(uint32_t{__ldg(bits)} << 16) * kUnshift : 0.0f;
      }
    }
  }

  // Scores of a tile in shared memory: this lane's two, of keys `first_key(lane)` and the next of block lane / 4.
  __device__ __forceinline__ float2 score(uint32_t tile, int lane) const {
    const int g = lane >> 2, t = lane & 3, odd = g & 1;
    const uint32_t data = tile + g * (kBlockKeys * kKeyBytes) + 16 * t;
    const uint32_t scales = tile + kScalesAt + g * (kBlockKeys * kScaleBytes) + t;
    const uint32_t data0 = data + odd * kKeyBytes, data1 = data + (odd ^ 1) * kKeyBytes;
    const uint32_t scales0 = scales + odd * kScaleBytes, scales1 = scales + (odd ^ 1) * kScaleBytes;
    float sum[kBlockKeys];  // over this lane's heads; sum[j] is key j ^ odd
#pragma unroll
    for (int step = 0; step < kBlockKeys / 2; ++step) {
      const uint4 v0 = load_shared(data0 + step * (2 * kKeyBytes)), v1 = load_shared(data1 + step * (2 * kKeyBytes));
      const uint32_t scale0 = ue8m0_scale_e2m1(load_shared_byte(scales0 + step * (2 * kScaleBytes)));
      const uint32_t scale1 = ue8m0_scale_e2m1(load_shared_byte(scales1 + step * (2 * kScaleBytes)));
      const uint32_t words0[4] = {v0.x, v0.y, v0.z, v0.w}, words1[4] = {v1.x, v1.y, v1.z, v1.w};
      float d[4][4] = {};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t pairs0[4], pairs1[4];
        decode_e2m1(words0[w], scale0, pairs0);
        decode_e2m1(words1[w], scale1, pairs1);
        const uint32_t a[4] = {pairs0[0], pairs1[0], pairs0[1], pairs1[1]};
        const uint32_t b[4] = {pairs0[2], pairs1[2], pairs0[3], pairs1[3]};
#pragma unroll
        for (int n = 0; n < 4; ++n) mma(d[n], a, q[2 * w][n][0], q[2 * w][n][1]);
#pragma unroll
        for (int n = 0; n < 4; ++n) mma(d[n], b, q[2 * w + 1][n][0], q[2 * w + 1][n][1]);
      }
      // x + |x| is twice the relu, in the pipe that integers leave free.
      float s0 = 0, s1 = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        s0 = fmaf(d[n][0] + fabsf(d[n][0]), weights[n][0], s0);
        s0 = fmaf(d[n][1] + fabsf(d[n][1]), weights[n][1], s0);
        s1 = fmaf(d[n][2] + fabsf(d[n][2]), weights[n][0], s1);
        s1 = fmaf(d[n][3] + fabsf(d[n][3]), weights[n][1], s1);
      }
      sum[2 * step] = s0, sum[2 * step + 1] = s1;
    }
    // Sums over the quad, each lane keeping two keys: ((0 + 1) + (2 + 3)) for each of them.
    float half[4], own[2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float kept = t & 1 ? sum[j + 4] : sum[j], sent = t & 1 ? sum[j] : sum[j + 4];
      half[j] = kept + __shfl_xor_sync(kAll, sent, 1);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float kept = t & 2 ? half[j + 2] : half[j], sent = t & 2 ? half[j] : half[j + 2];
      own[j] = kept + __shfl_xor_sync(kAll, sent, 2);
    }
    return odd ? make_float2(own[1], own[0]) : make_float2(own[0], own[1]);
  }

  __device__ __forceinline__ static int first_key(int lane) { return 4 * (lane & 1) + (lane & 2); }
};

template <bool LISTED>
__device__ __forceinline__ void store(const Params& p, const Tile& tile, float2 scores, int lane) {
  const int g = lane >> 2, key = Queries::first_key(lane), present = tile.present[g];
  if (key >= present) scores.x = -INFINITY;
  if (key + 1 >= present) scores.y = -INFINITY;
  float top = fmaxf(scores.x, scores.y);
  top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
  top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
  const int column = tile.place * kBlocks + g;
  if (LISTED) {
    if (column >= p.num_blocks) return;
    const int64_t block = static_cast<int64_t>(tile.row) * p.num_blocks + column;
    *reinterpret_cast<float2*>(p.scores + block * kBlockKeys + key) = scores;
    if ((lane & 3) == 0) p.block_max[block] = top;
  } else {
    if ((lane & 3) == 0 && present) p.block_max[static_cast<int64_t>(tile.row) * (p.width / kBlockKeys) + column] = top;
    top = fmaxf(top, __shfl_xor_sync(kAll, top, 4));
    top = fmaxf(top, __shfl_xor_sync(kAll, top, 8));
    top = fmaxf(top, __shfl_xor_sync(kAll, top, 16));
    if (lane == 0) p.tile_max[static_cast<int64_t>(tile.row) * (p.width / kTileKeys) + tile.place] = top;
  }
}

// ---- Kernel ---------------------------------------------------------------------------------------------------------

template <bool LISTED>
__global__ void __launch_bounds__(kThreads, 1) index_scores_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = __shfl_sync(kAll, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (lane < kStages) mbarrier_init(shared_address(&shared.full[warp][lane]), 1);
  mbarrier_init_fence();
  __syncwarp();
  let_next_kernel_start();
  wait_for_kernels_before();

  // Warps of one block lie a grid apart, so that few tiles spread over all multiprocessors.
  const int64_t worker = warp * gridDim.x + blockIdx.x, workers = kWarps * gridDim.x;
  const int tiles = count_tiles<LISTED>(params, lane);
  const int first = static_cast<int>(worker * tiles / workers), last = static_cast<int>((worker + 1) * tiles / workers);
  if (first == last) return;

  Feed<LISTED> feed(params, shared, warp, lane, first, last);
  for (int s = 0; s < kStages && first + s < last; ++s) feed.issue(s);

  Queries queries;
  int row = -1, stage = 0, phase = 0;
  for (int i = first; i < last; ++i) {
    const Tile& tile = shared.tiles[warp][stage];
    if (tile.row != row) {  // a row's queries come while its keys are under way
      row = tile.row;
      queries.load(params, row, lane);
    }
    mbarrier_wait(shared_address(&shared.full[warp][stage]), phase);
    // Of a list, a tile may be empty.
    const bool any = !LISTED || __any_sync(kAll, tile.present[lane % kBlocks]);
    const float2 scores =
        any ? queries.score(shared_address(shared.keys[warp][stage]), lane) : make_float2(-INFINITY, -INFINITY);
    store<LISTED>(params, tile, scores, lane);
    __syncwarp();  // every lane is through with the stage
    if (i + kStages < last) feed.issue(stage);
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <bool LISTED>
cudaError_t launch(const Params& params, int blocks, bool early, cudaStream_t stream) {
  return launch_kernel(index_scores_kernel<LISTED>, params, blocks, kThreads, sizeof(Shared), early, stream);
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
  return p;
}

bool serves(int heads, int ratio, int grid) { return heads <= kHeads && (ratio == 1 || ratio == 2) && grid >= 1; }

}  // namespace

// Return a cudaError_t, 0 for success. `grid`: blocks of the launch, at least 1; any number is right.
extern "C" int csa2_block_maxima(const void* q, const void* weights, const void* cache, int64_t page_stride,
                                 const void* req_to_token, int64_t request_stride, int req_to_token_wide,
                                 const void* requests, int requests_wide, const void* visible, int visible_wide,
                                 int ratio, int rows, int heads, int skip, int width, void* block_max, void* tile_max,
                                 int grid, int early, void* stream) {
  if (!serves(heads, ratio, grid)) return cudaErrorInvalidValue;
  Params p = params_of(q, weights, cache, page_stride, req_to_token, request_stride, req_to_token_wide, requests,
                       requests_wide, visible, visible_wide, ratio, rows, heads, skip);
  p.width = width, p.block_max = static_cast<float*>(block_max), p.tile_max = static_cast<float*>(tile_max);
  return launch<false>(p, grid, early, static_cast<cudaStream_t>(stream));
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
  return launch<true>(p, grid, early, static_cast<cudaStream_t>(stream));
}
