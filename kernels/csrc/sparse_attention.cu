// Sparse decode attention over packed KV records on Hopper (sm_90a). The contract is in cuda_sparse_attention.py.
//
// Work. A thread block takes rows (query tokens) one after another, a tile of HEADS heads and one share (split) of a
// row's tiles of 64 keys. Splits of a row are the blocks of one cluster: they combine through distributed shared
// memory, in one launch and without scratch.
//
// Layout. Keys are decoded once, to bf16, into a tile [64 keys][512 dims] that serves as K and as V: eight panels of
// 64 dims, each [64 keys][128 bytes] with the 128-byte swizzle that wgmma and ldmatrix read without bank conflicts.
//
// Order of dims. In every aligned group of 8 dims the tile, Q and O hold 0 4 1 5 2 6 3 7, the order in which nibbles
// fall out of a 32-bit word in pairs; in odd panels the groups of 8 are in the order of `place`. Q is permuted as it is
// loaded, O as it is stored.
//
// Scale. Decoded values carry a factor 2^-16 (an e4m3 scale times the 2^126 that e2m1 bits need would overflow bf16);
// scores and outputs are multiplied by 2^16. Both steps are exact.
//
// Roles. Warpgroups 2 and 3 gather records and decode them, 0 and 1 multiply: 0 scores a tile and hands P to 1.
//
//   HEADS = 64  wgmma, M = 64 heads. Each of the two adds P V to its half of the dims, while 0 goes on to the next
//               tile's scores. P multiplies from registers: by ncu's counts an operand wavefront of wgmma (128 bytes
//               of shared memory) takes two cycles, as dear as the product it feeds.
//   HEADS = 16  mma.sync, M = 16 heads, whose ldmatrix reads the tile in half of those cycles. A warp of 0 scores 16
//               of the keys, with Q in registers; a warp of 1 adds P V to 128 of the dims. That leaves registers to
//               the decoders, whose instructions need not wait for each other then. Both meet once a tile: P is made
//               with the peaks of the tiles before, and made again where a score is far above them.

#include "launch.cuh"
#include "records.cuh"

namespace {

constexpr int kDims = 512;
constexpr int kTileKeys = 64;
constexpr int kPanels = 8;
constexpr int kPanelBytes = kTileKeys * 128;
constexpr int kTileBytes = kPanels * kPanelBytes;
constexpr int kSwaBytes = 528;   // 512 e4m3, then 16 ue8m0, one per 32 dims
constexpr int kMainBytes = 288;  // 512 e2m1 in 256 bytes, then 32 e4m3, one per 16 dims
constexpr int kConsumers = 256;  // threads of the two warpgroups that multiply
constexpr int kProducers = 256;  // threads of the two that gather and decode
constexpr int kMaxSplits = 16;
constexpr float kUnshift = 65536.0f;
constexpr float kLog2E = 1.4426950408889634f;
// A finite start keeps a row without keys at exp2(-inf) = 0 rather than NaN.
constexpr float kNoPeak = -1e30f;
// A running maximum (base 2) moves only when it would grow by more: P stays below 2^8, and O is rarely rescaled.
constexpr float kPeakStep = 8.0f;

constexpr int kConsumerBarrier = 1;  // 0 is __syncthreads

struct Params {
  const __nv_bfloat16* q;  // [rows, heads, 512], strides q_row, q_head
  int64_t q_row, q_head;
  const uint8_t* swa;     // [slots, 528]
  const void* swa_slots;  // [rows, window], row stride swa_row
  int64_t swa_row;
  const uint8_t* main;     // [slots, 288]
  const void* main_slots;  // [rows, topk], row stride main_row
  int64_t main_row;
  const float* sink;   // [heads]
  __nv_bfloat16* out;  // [rows, heads, 512] contiguous
  int heads, window, topk;
  int swa_wide, main_wide;  // slots are int64, otherwise int32
  int swa_tiles, tiles;     // tiles of 64 keys: the window's come first
  int rows, splits;
  float scale_log2;  // softmax scale * log2(e) * 2^16
};

// Where a panel holds its `chunk`-th 8 dims; its own inverse. Four lanes that decode neighbouring pieces of a key, of 32
// dims or of 16, then store to as many different banks.
__device__ __forceinline__ int place(int panel, int chunk) { return chunk ^ ((panel & 1) * 2); }

// ---- Gather ---------------------------------------------------------------------------------------------------------

// What is on its way to a warp in shared memory: scales of its eight keys in the next tile, and their slots in a later
// one. As loads to registers they would be the last of many, and the assembler counts all loads that a loop carries as
// one: who wants the first waits for the last.
struct Arriving {
  uint4 scales[16];  // two halves of a key's; a window record has one
  int slots[8];
};

// The record of a key that does not exist.
__device__ __align__(16) const uint8_t kNoRecord[kSwaBytes] = {};

// Brings tiles of 64 keys in, eight warps with eight keys each. Four neighbouring lanes share a key: of every 64 bytes
// of its record each loads 16. Of main records the registers hold two tiles, of which one is decoded while the other is
// on its way; of window records one, each register being loaded again once it was decoded. The records of the tile after
// those have been sent for to L2, the slots of the one after that are on their way to shared memory.
struct Gather {
  const Params& params;
  const uint32_t arriving;  // this warp's, in shared memory
  const int step;           // from one row of this block to the next
  const int first, last;
  const int key, quarter;  // of the warp's eight keys; of the key's lanes
  const int line;          // the key's, among a tile's 64
  int row, tile;           // whose slots are asked for next
  const int* slots_at;     // this key's there
  int slots_left;          // from it to the end of its table's row
  const uint8_t* next;     // this lane's record in the tile after that in `raw`
  int slot;                // of the tile after `next`, whose record has been sent for
  int late;                // of the tile after that
  uint32_t kinds;          // which tiles are the window's, a bit each: in `raw`, `next`, `slot`, `late`, asked for
  uint32_t held;           // whether the key exists, a bit each: in `raw`, under `next`
  uint4 raw[8];  // a window record, or a main one and the next

  __device__ __forceinline__ Gather(const Params& p, Arriving& arriving, int row, int step, int first, int last,
                                    int warp, int lane)
      : params(p), arriving(shared_address(&arriving)), step(step), first(first), last(last), key(lane >> 2),
        quarter(lane & 3), line(warp * 8 + key), row(row), tile(first), kinds(0), held(0) {
    enter();
    const int now = load_slot(1);
    slot = load_slot(2), late = load_slot(3);
    next = record(now, next_swa()), held = now >= 0 ? 2 : 0;
    send_for(slot, 2);
    ask();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < 4 || next_swa()) raw[i] = load(i);
    }
    step_on();
  }

  __device__ __forceinline__ bool swa() const { return kinds & 1; }
  __device__ __forceinline__ bool next_swa() const { return kinds & 2; }
  __device__ __forceinline__ bool exists() const { return held & 1; }

  // Finds the slots of `tile`, the first or the first of main KV.
  __device__ __forceinline__ void enter() {
    const bool window = tile < params.swa_tiles;
    const int column = (window ? tile : tile - params.swa_tiles) * kTileKeys + line;
    const int64_t start = row * (window ? params.swa_row : params.main_row) + column;
    slots_at = static_cast<const int*>(window ? params.swa_slots : params.main_slots) +
               (start << (window ? params.swa_wide : params.main_wide));
    slots_left = row < params.rows ? (window ? params.window : params.topk) - column : 0;
  }

  // On to the next tile's slots; `bit`: of the tile's kind.
  __device__ __forceinline__ void pass_tile(int bit) {
    const bool window = tile < params.swa_tiles;
    kinds |= uint32_t{window} << bit;
    slots_at += kTileKeys << (window ? params.swa_wide : params.main_wide), slots_left -= kTileKeys;
    if (++tile >= last) {
      row += step, tile = first;
      enter();
    } else if (tile == params.swa_tiles) {
      enter();
    }
  }

  __device__ __forceinline__ int load_slot(int bit) {
    int slot = -1;
    if (slots_left > 0) slot = load_global(slots_at);
    pass_tile(bit);
    return slot;
  }

  __device__ __forceinline__ const uint8_t* record(int slot, bool window) const {
    if (slot < 0) return kNoRecord;
    return window ? params.swa + int64_t{slot} * kSwaBytes : params.main + int64_t{slot} * kMainBytes;
  }

  __device__ __forceinline__ void send_for(int slot, int bit) const {
    const bool window = kinds >> bit & 1;
    if (slot < 0 || !(window || quarter < 3)) return;
    prefetch(record(slot, window) + 128 * quarter);
  }

  // Asks for the next tile's scales and for slots: two lanes the halves of a main record's scales or one a window
  // record's, another the slot.
  __device__ __forceinline__ void ask() {
    const uint32_t slot_at = arriving + 256 + key * 4;
    if (quarter == 2) {
      if (slots_left > 0) {
        copy_async<4>(slot_at, slots_at);
      } else {
        store_shared(slot_at, ~0u);
      }
    } else if (quarter < (next_swa() ? 1 : 2)) {
      copy_async<16>(arriving + key * 32 + quarter * 16, next + (next_swa() ? kDims : kDims / 2) + 16 * quarter);
    }
    pass_tile(4);
  }

  // What was asked for, and asks again.
  __device__ __forceinline__ void receive(uint4 (&scales)[2]) {
    copy_async_wait();
    __syncwarp();
    scales[0] = load_shared(arriving + key * 32), scales[1] = load_shared(arriving + key * 32 + 16);
    late = static_cast<int>(load_shared_word(arriving + 256 + key * 4));
    __syncwarp();
    ask();
  }

  // 16 of the piece-th 64 bytes of the next tile's record: a main one has four, a window one eight.
  __device__ __forceinline__ uint4 load(int piece) const { return load_record(next + 64 * piece + 16 * quarter); }

  // Decodes this warp's keys into the tile at `base` and brings the next tile's in. `advance` must follow.
  __device__ __forceinline__ void decode(uint32_t base) {
    uint4 scales[2];
    receive(scales);
    const uint32_t at_key = base + line * 128;
    if (swa()) {
      decode_window(at_key, scales[0]);
    } else {
      decode_main(at_key, scales);
    }
  }

  // A chunk's place is an exclusive or of what the lane and what the loop says, and rows are 128 bytes.
  __device__ __forceinline__ void decode_window(uint32_t at_key, const uint4& scales) {
    // This lane's eight scales, a byte each.
    const uint32_t pick = quarter & 2 ? 0x7531 : 0x6420;
    const uint32_t picked[2] = {prmt(scales.x, scales.y, pick), prmt(scales.z, scales.w, pick)};
    const uint32_t at = at_key + ((2 * quarter) ^ key) * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // panel i: 16 dims from 16 * quarter on
      const uint32_t scale = ue8m0_scale(here(picked[i / 4]) >> (8 * (i % 4)));
      const uint4 v = raw[i];
      decode_e4m3(v.x, v.y, scale, (at ^ place(i, 0) * 16) + i * kPanelBytes);
      decode_e4m3(v.z, v.w, scale, (at ^ place(i, 1) * 16) + i * kPanelBytes);
      if (i < 4 || next_swa()) raw[i] = load(i);
      __syncwarp();  // as below
    }
  }

  __device__ __forceinline__ void decode_main(uint32_t at_key, const uint4 (&scales)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[4 + i] = load(next_swa() ? 4 + i : i);
    __syncwarp();  // no load moves past it: the assembler would have them wait for the tile's end
    // This lane's four pairs of scales.
    const uint32_t pick = quarter & 1 ? 0x7632 : 0x5410;
    uint32_t picked[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      picked[i] = quarter & 2 ? prmt(scales[i].y, scales[i].w, pick) : prmt(scales[i].x, scales[i].z, pick);
    }
    const int panel = quarter >> 1, chunk = (quarter & 1) * 4;
    const uint32_t at = at_key + panel * kPanelBytes + (place(panel, chunk) ^ key) * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // panel 2 * i + quarter / 2: 32 dims from 32 * (quarter % 2) on
      const uint32_t pair = e4m3_scales(here(picked[i / 2]) >> (16 * (i % 2)));
      const uint32_t low = prmt(pair, pair, 0x1010), high = prmt(pair, pair, 0x3232);
      const uint4 v = raw[i];
      decode_e2m1(v.x, low, at + 2 * i * kPanelBytes);
      decode_e2m1(v.y, low, (at ^ 16) + 2 * i * kPanelBytes);
      decode_e2m1(v.z, high, (at ^ 32) + 2 * i * kPanelBytes);
      decode_e2m1(v.w, high, (at ^ 48) + 2 * i * kPanelBytes);
      if (next_swa()) raw[i] = load(i);
    }
  }

  // To the next tile, whose bytes are in registers or on their way there.
  __device__ __forceinline__ void advance() {
    if (!swa() && !next_swa()) {
#pragma unroll
      for (int i = 0; i < 4; ++i) raw[i] = raw[4 + i];
    }
    step_on();
  }

  __device__ __forceinline__ void step_on() {
    send_for(late, 3);
    kinds >>= 1, held = held >> 1 | (slot >= 0 ? 2 : 0);
    next = record(slot, next_swa()), slot = late;
  }
};

// ---- Shared memory --------------------------------------------------------------------------------------------------

// Tiles in shared memory.
template <int HEADS>
constexpr int kStages = HEADS == 64 ? 2 : 3;

template <int HEADS>
struct alignas(1024) Shared {
  uint8_t keys[kStages<HEADS>][kTileBytes];
  uint8_t q[HEADS * kDims * 2];  // [8 panels][HEADS][128 bytes], swizzled; at a row's end O passes through
  // P, two in turn. 64 heads: warpgroup 0's registers for 1, [4 steps of 16 keys][128 threads][16 bytes]; the two drift
  // apart by a tile. 16 heads: [16][64 keys], swizzled; a warp may still read one when another makes the next.
  uint8_t weights[2][HEADS * 128];
  float2 factors[2][128];               // 64 heads: what O is multiplied by before that P V
  alignas(16) float maxima[16][8];      // 16 heads: per head and warp; at a row's end, and eight keys
  float moves[16];                      // 16 heads: what O is multiplied by where peaks move
  float peaks[HEADS];                   // at a row's end: maxima, base 2
  float totals[HEADS];                  // denominators, then what O is multiplied by
  float shares[2][kMaxSplits * HEADS];  // of the row's splits
  uint8_t present[kStages<HEADS>][8];   // bit k of byte b: key 8 b + k of the tile exists
  alignas(16) Arriving arriving[kProducers / 32];
  uint64_t full[kStages<HEADS>], empty[kStages<HEADS>];
};

// ---- What both kinds of consumer do at a row's ends -----------------------------------------------------------------

// A thread holds, as mma leaves them, two heads (row0 + lane / 4 and the eighth after it) of PANELS panels of 64 dims.
template <int HEADS, int PANELS>
struct Consumer {
  Shared<HEADS>& shared;
  const Params& params;
  const float scale_log2;
  const int thread, warp, lane;  // of the 256 consumers
  const int head0;               // of the tile of heads
  const int row0, panel0;
  float o[PANELS > 0 ? PANELS : 1][32];
  float peak[2];  // running maxima, base 2

  __device__ __forceinline__ Consumer(Shared<HEADS>& s, const Params& p, int warp, int lane, int head0, int row0,
                                      int panel0)
      : shared(s), params(p), scale_log2(p.scale_log2), thread(warp * 32 + lane), warp(warp), lane(lane), head0(head0),
        row0(row0), panel0(panel0) {}

  __device__ __forceinline__ static void meet() { barrier_sync(kConsumerBarrier, kConsumers); }

  // Loads a row's Q, clears O and the maxima. Q must be free; a consumer barrier is inside.
  __device__ __forceinline__ void start(int row) {
    const int thread = here(this->thread);
    const __nv_bfloat16* source = params.q + row * params.q_row + head0 * params.q_head;
    const uint32_t target = shared_address(shared.q);
    const int heads = params.heads - head0;
    constexpr int kChunks = HEADS * 64 / kConsumers;
    constexpr int kBatch = kChunks < 8 ? kChunks : 8;
#pragma unroll
    for (int b = 0; b < kChunks; b += kBatch) {
      uint4 v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int head = (b + i) * 4 + thread / 64, chunk = thread % 64;
        v[i] = make_uint4(0, 0, 0, 0);
        if (head < heads) v[i] = load_global(reinterpret_cast<const uint4*>(source + head * params.q_head + chunk * 8));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int head = (b + i) * 4 + thread / 64, chunk = thread % 64;
        const uint32_t at = target + chunk / 8 * (HEADS * 128) + head * 128 + (place(chunk / 8, chunk % 8) ^ (head & 7)) * 16;
        store_shared(at, prmt(v[i].x, v[i].z, 0x5410), prmt(v[i].x, v[i].z, 0x7632), prmt(v[i].y, v[i].w, 0x5410),
                     prmt(v[i].y, v[i].w, 0x7632));
      }
    }
#pragma unroll
    for (int p = 0; p < PANELS; ++p) {
#pragma unroll
      for (int i = 0; i < 32; ++i) o[p][i] = 0;
    }
    peak[0] = peak[1] = kNoPeak;
    fence_async();
    meet();
  }

  // The running maxima after scores of maximum `now`: what O and the sums are to be multiplied by.
  __device__ __forceinline__ float2 move_peaks(float now0, float now1) {
    float2 factor = make_float2(1.0f, 1.0f);
    if (now0 > peak[0] + kPeakStep) factor.x = fast_exp2(peak[0] - now0), peak[0] = now0;
    if (now1 > peak[1] + kPeakStep) factor.y = fast_exp2(peak[1] - now1), peak[1] = now1;
    return factor;
  }

  __device__ __forceinline__ void scale_output(float2 factor) {
    // Maxima settle after a few tiles.
    if (!__any_sync(0xFFFFFFFFu, factor.x != 1.0f || factor.y != 1.0f)) return;
#pragma unroll
    for (int p = 0; p < PANELS; ++p) {
#pragma unroll
      for (int i = 0; i < 32; ++i) o[p][i] *= i & 2 ? factor.y : factor.x;
    }
  }

  __device__ __forceinline__ float sink_log2(int head) const {
    return head0 + head < params.heads ? load_global(params.sink + head0 + head) * kLog2E : 0.0f;
  }

  // What O is multiplied by; a row without keys gives zeros, whatever the sink.
  __device__ __forceinline__ static float norm(float total) { return total > 0.0f ? kUnshift / total : 0.0f; }

  // Eight dims of a head in their own order.
  __device__ __forceinline__ void store_chunk(int row, int head, int chunk, const uint4& v) const {
    if (head0 + head >= params.heads) return;
    const uint4 ordered = make_uint4(prmt(v.x, v.y, 0x5410), prmt(v.z, v.w, 0x5410), prmt(v.x, v.y, 0x7632),
                                     prmt(v.z, v.w, 0x7632));
    const int64_t line = static_cast<int64_t>(row) * params.heads + head0 + head;
    *reinterpret_cast<uint4*>(params.out + line * kDims + place(chunk / 8, chunk) * 8) = ordered;
  }

  // The half of such dims that lies together in the tile's order: dims 0 4 1 5 or 2 6 3 7 of eight.
  __device__ __forceinline__ void store_half_chunk(int row, int head, int half, const float4& v) const {
    if (head0 + head >= params.heads) return;
    const int chunk = half / 2;
    const int64_t line = static_cast<int64_t>(row) * params.heads + head0 + head;
    __nv_bfloat16* at = params.out + line * kDims + place(chunk / 8, chunk) * 8 + half % 2 * 2;
    *reinterpret_cast<uint32_t*>(at) = pack_bf16x2(v.x, v.z);
    *reinterpret_cast<uint32_t*>(at + 4) = pack_bf16x2(v.y, v.w);
  }

  // With peaks and totals in shared memory: the whole row was here, and O goes out through Q's memory. Ends in a
  // consumer barrier.
  __device__ __forceinline__ void finish_alone(int row) {
    const int thread = here(this->thread), lane = here(this->lane);
    if (thread < HEADS) {
      shared.totals[thread] = norm(shared.totals[thread] + fast_exp2(sink_log2(thread) - shared.peaks[thread]));
    }
    meet();
    const int head = row0 + (lane >> 2);
    scale_output(make_float2(shared.totals[head], shared.totals[head + 8]));
    const uint32_t staged = shared_address(shared.q);
    const int line = row0 + (lane & 15), half = lane >> 4;
#pragma unroll
    for (int p = 0; p < PANELS; ++p) {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const int chunk = (panel0 + p) * 8 + j + half;
        const float* d = &o[p][4 * j];
        store_matrices(staged + line * 1024 + (chunk ^ (line & 7)) * 16, pack_bf16x2(d[0], d[1]),
                       pack_bf16x2(d[2], d[3]), pack_bf16x2(d[4], d[5]), pack_bf16x2(d[6], d[7]));
      }
    }
    meet();
    const int chunk = thread % 64;
#pragma unroll 4
    for (int head = thread / 64; head < HEADS; head += kConsumers / 64) {
      store_chunk(row, head, chunk, load_shared(staged + head * 1024 + (chunk ^ (head & 7)) * 16));
    }
    meet();
  }

  // fp32 O [HEADS][512], over the tiles of keys: rows of 2048 bytes whose 32-byte pieces are spread over banks.
  __device__ __forceinline__ static int spread(int head) { return ((head ^ (head >> 1)) & 3) * 32; }

  // The same where the row's splits are this cluster: each leaves its sums in its shared memory and writes a share of
  // the output.
  __device__ __forceinline__ void finish_together(int row, int splits) {
    const int thread = here(this->thread), lane = here(this->lane);
    const uint32_t sums_at = shared_address(shared.keys);
#pragma unroll
    for (int p = 0; p < PANELS; ++p) {
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        const int head = row0 + (lane >> 2) + (i & 2) * 4;
        const int dim = (panel0 + p) * 64 + i / 4 * 8 + 2 * (lane & 3);
        const uint32_t at = sums_at + head * 2048 + ((dim * 4) ^ spread(head));
        store_shared(at, o[p][i], o[p][i + 1]);
      }
    }
    cluster_sync();

    float *shares = shared.shares[0], *totals = shared.shares[1];  // [splits][HEADS]
    for (int i = thread; i < splits * HEADS; i += kConsumers) {
      shares[i] = load_remote(remote_address(shared_address(&shared.peaks[i % HEADS]), i / HEADS));
      totals[i] = load_remote(remote_address(shared_address(&shared.totals[i % HEADS]), i / HEADS));
    }
    meet();
    if (thread < HEADS) {
      float top = kNoPeak;
      for (int r = 0; r < splits; ++r) top = fmaxf(top, shares[r * HEADS + thread]);
      float total = fast_exp2(sink_log2(thread) - top);
      for (int i = thread; i < splits * HEADS; i += HEADS) total += fast_exp2(shares[i] - top) * totals[i];
      const float factor = norm(total);
      for (int i = thread; i < splits * HEADS; i += HEADS) shares[i] = fast_exp2(shares[i] - top) * factor;
    }
    meet();
    // Lanes read side by side: 16 bytes each of a line, for half of a group of 8 dims.
    constexpr int kPieces = 4;
    for (int first = cluster_rank() * kConsumers + thread; first < HEADS * 128; first += kPieces * splits * kConsumers) {
      float4 total[kPieces] = {};
#pragma unroll 2
      for (int r = 0; r < splits; ++r) {
        float4 part[kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          // Past the end the last piece again, which is not stored.
          const int piece = min(first + i * splits * kConsumers, HEADS * 128 - 1), head = piece / 128;
          part[i] = load_remote4(remote_address(sums_at + head * 2048 + ((piece % 128 * 16) ^ spread(head)), r));
        }
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const int piece = min(first + i * splits * kConsumers, HEADS * 128 - 1);
          const float share = shares[r * HEADS + piece / 128];
          total[i].x += part[i].x * share, total[i].y += part[i].y * share;
          total[i].z += part[i].z * share, total[i].w += part[i].w * share;
        }
      }
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int piece = first + i * splits * kConsumers;
        if (piece < HEADS * 128) store_half_chunk(row, piece / 128, piece % 128, total[i]);
      }
    }
    cluster_meet();  // the others may still be reading here
  }
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

// ---- 64 heads -------------------------------------------------------------------------------------------------------

template <bool SCORES>
struct WideConsumer : Consumer<64, 4> {
  float sum[2];  // this thread's of the denominators

  __device__ __forceinline__ WideConsumer(Shared<64>& s, const Params& p, int warp, int lane, int head0)
      : Consumer(s, p, warp, lane, head0, warp % 4 * 16, SCORES ? 0 : 4) {}

  __device__ __forceinline__ void begin() { sum[0] = sum[1] = 0; }

  // Scores of the tile and the online softmax: P as the A operand of four steps of 16 keys, and the factors of O.
  __device__ __forceinline__ float2 score(int stage, uint32_t (&weights)[4][4]) {
    float s[32];
    const uint64_t keys = descriptor(shared_address(shared.keys[stage]));
    const uint64_t q = descriptor(shared_address(shared.q));
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int at = (p * kPanelBytes + k * 32) >> 4;  // Q's panels are as large as the tile's
        wgmma_shared(s, q + at, keys + at, p + k > 0);
      }
    }
    wgmma_commit();
    const uint2 present = *reinterpret_cast<const uint2*>(shared.present[stage]);
    wgmma_wait_for<0>(s);

    if ((present.x & present.y) != 0xFFFFFFFFu) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        // Key 8 * (i / 4) + 2 * (lane % 4) + i % 2.
        const uint32_t byte = (i < 16 ? present.x : present.y) >> (i / 4 % 4 * 8 + i % 2);
        if (!(byte >> (2 * (lane & 3)) & 1)) s[i] = -INFINITY;
      }
    }
    float now0 = -INFINITY, now1 = -INFINITY;
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      now0 = fmaxf(now0, fmaxf(s[i], s[i + 1]));
      now1 = fmaxf(now1, fmaxf(s[i + 2], s[i + 3]));
    }
    const float2 factor = move_peaks(quad_max(now0) * scale_log2, quad_max(now1) * scale_log2);
    float sum0 = 0, sum1 = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const float a = fast_exp2(s[i] * scale_log2 - peak[0]), b = fast_exp2(s[i + 1] * scale_log2 - peak[0]);
      const float c = fast_exp2(s[i + 2] * scale_log2 - peak[1]), d = fast_exp2(s[i + 3] * scale_log2 - peak[1]);
      sum0 += a + b, sum1 += c + d;
      weights[i / 8][i / 4 % 2 * 2] = pack_bf16x2(a, b);
      weights[i / 8][i / 4 % 2 * 2 + 1] = pack_bf16x2(c, d);
    }
    sum[0] = sum[0] * factor.x + sum0, sum[1] = sum[1] * factor.y + sum1;
    return factor;
  }

  __device__ __forceinline__ void attend(int stage, int buffer) {
    uint32_t weights[4][4];
    float2 factor;
    const int mate = thread % 128;  // the same heads and keys in the other warpgroup
    const uint32_t passed = shared_address(shared.weights[buffer]) + mate * 16;
    if constexpr (SCORES) {
      factor = score(stage, weights);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        store_shared(passed + k * 2048, weights[k][0], weights[k][1], weights[k][2], weights[k][3]);
      }
      shared.factors[buffer][mate] = factor;
      meet();
    } else {
      meet();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4 v = load_shared(passed + k * 2048);
        weights[k][0] = v.x, weights[k][1] = v.y, weights[k][2] = v.z, weights[k][3] = v.w;
      }
      factor = shared.factors[buffer][mate];
    }
    scale_output(factor);
    const uint64_t values = descriptor(shared_address(shared.keys[stage]) + panel0 * kPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int p = 0; p < 4; ++p) wgmma_registers(o[p], weights[k], values + ((p * kPanelBytes + k * 2048) >> 4));
    }
    wgmma_commit();
    wgmma_wait_for<0>(o[0]);
#pragma unroll
    for (int p = 1; p < 4; ++p) waited_for(o[p]);
  }

  __device__ __forceinline__ void share_sums() {
    if constexpr (SCORES) {
      const float total0 = quad_sum(sum[0]), total1 = quad_sum(sum[1]);
      const int head = row0 + (lane >> 2);
      if ((lane & 3) == 0) {
        shared.totals[head] = total0, shared.totals[head + 8] = total1;
        shared.peaks[head] = peak[0], shared.peaks[head + 8] = peak[1];
      }
    }
    meet();
  }
};

// ---- 16 heads -------------------------------------------------------------------------------------------------------

// Scores the tiles, 16 of a tile's keys a warp, and makes P.
struct NarrowScorer : Consumer<16, 0> {
  uint32_t q[32][4];  // A operands of 32 steps of 16 dims
  float2 sum[2];      // this thread's of the denominators, per group of eight keys

  __device__ __forceinline__ NarrowScorer(Shared<16>& s, const Params& p, int warp, int lane, int head0)
      : Consumer(s, p, warp, lane, head0, 0, 0) {}

  // Q from shared memory to registers.
  __device__ __forceinline__ void begin() {
    sum[0] = sum[1] = make_float2(0.0f, 0.0f);
    const int head = lane & 15;
#pragma unroll
    for (int k = 0; k < 32; ++k) {
      const int chunk = k % 4 * 2 + (lane >> 4);
      const uint32_t panel = shared_address(shared.q) + k / 4 * (16 * 128);
      load_matrices<false>(panel + head * 128 + (chunk ^ (head & 7)) * 16, q[k]);
    }
  }

  __device__ __forceinline__ void attend(int stage, int buffer) {
    float s[2][4];
    score(stage, s);
    const int head = lane >> 2;
    const uint32_t weights = shared_address(shared.weights[buffer]);
    // Maxima seldom move the peaks: P is made with those of before, while the warps ask each other if it may stand.
    float2 sums[2];
    put_weights(weights, s, sums);
    const float top0 = fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1]));
    const float top1 = fmaxf(fmaxf(s[0][2], s[0][3]), fmaxf(s[1][2], s[1][3]));
    if (barrier_any(kConsumerBarrier, kConsumers, top0 > peak[0] + kPeakStep || top1 > peak[1] + kPeakStep)) {
      const float most0 = quad_max(top0), most1 = quad_max(top1);
      if ((lane & 3) == 0) shared.maxima[head][warp] = most0, shared.maxima[head + 8][warp] = most1;
      meet();
      const float2 factor = move_peaks(row_max(shared.maxima[head]), row_max(shared.maxima[head + 8]));
      put_weights(weights, s, sums);
#pragma unroll
      for (int g = 0; g < 2; ++g) sum[g].x *= factor.x, sum[g].y *= factor.y;
      if (warp == 0 && (lane & 3) == 0) shared.moves[head] = factor.x, shared.moves[head + 8] = factor.y;
      meet();
    }
#pragma unroll
    for (int g = 0; g < 2; ++g) sum[g].x += sums[g].x, sum[g].y += sums[g].y;
  }

  // Scores, base 2, of keys 16 * warp + 8 * g on: this lane's are 2 * (lane % 4) and the next, of head lane / 4 and of
  // the eighth after it.
  __device__ __forceinline__ void score(int stage, float (&scores)[2][4]) {
    const uint32_t tile = shared_address(shared.keys[stage]) + warp * (16 * 128);
    float s[2][4][4] = {};  // sums that do not wait for each other
    const int key = lane & 7;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int chunk = half * 4 + (lane >> 3);
        const uint32_t at = tile + p * kPanelBytes + key * 128 + (chunk ^ key) * 16;
        uint32_t b[2][4];
        load_matrices<false>(at, b[0]);
        load_matrices<false>(at + 8 * 128, b[1]);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          mma(s[0][2 * half + k], q[p * 4 + half * 2 + k], b[0][2 * k], b[0][2 * k + 1]);
          mma(s[1][2 * half + k], q[p * 4 + half * 2 + k], b[1][2 * k], b[1][2 * k + 1]);
        }
      }
    }
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const uint32_t present = shared.present[stage][2 * warp + g] >> (2 * (lane & 3));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float sum = (s[g][0][i] + s[g][1][i]) + (s[g][2][i] + s[g][3][i]);
        scores[g][i] = present >> (i & 1) & 1 ? sum * scale_log2 : -INFINITY;
      }
    }
  }

  // P of this lane's scores to `weights`, [16][64 keys], and what it adds to the denominators.
  __device__ __forceinline__ void put_weights(uint32_t weights, const float (&s)[2][4], float2 (&sums)[2]) const {
    const int head = lane >> 2;  // the eighth head after it has its swizzle
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const float a = fast_exp2(s[g][0] - peak[0]), b = fast_exp2(s[g][1] - peak[0]);
      const float c = fast_exp2(s[g][2] - peak[1]), d = fast_exp2(s[g][3] - peak[1]);
      const uint32_t at = weights + head * 128 + ((2 * warp + g) ^ head) * 16 + (lane & 3) * 4;
      store_shared(at, pack_bf16x2(a, b));
      store_shared(at + 1024, pack_bf16x2(c, d));
      sums[g] = make_float2(a + b, c + d);
    }
  }

  __device__ __forceinline__ static float row_max(const float (&maxima)[8]) {
    const float4 a = *reinterpret_cast<const float4*>(maxima);
    return fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w));
  }

  __device__ __forceinline__ void share_sums() {
    const int head = lane >> 2;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const float total0 = quad_sum(sum[g].x), total1 = quad_sum(sum[g].y);
      const int group = 2 * warp + g;
      if ((lane & 3) == 0) shared.maxima[head][group] = total0, shared.maxima[head + 8][group] = total1;
    }
    if (warp == 0 && (lane & 3) == 0) shared.peaks[head] = peak[0], shared.peaks[head + 8] = peak[1];
    meet();
    if (thread < 16) {
      float total = 0;
      for (int g = 0; g < 8; ++g) total += shared.maxima[thread][g];
      shared.totals[thread] = total;
    }
    meet();
  }
};

// Adds P V, 128 of the dims a warp.
struct NarrowAdder : Consumer<16, 2> {
  __device__ __forceinline__ NarrowAdder(Shared<16>& s, const Params& p, int warp, int lane, int head0)
      : Consumer(s, p, warp, lane, head0, 0, 2 * (warp - 4)) {}

  __device__ __forceinline__ void begin() {}

  __device__ __forceinline__ void attend(int stage, int buffer) {
    if (barrier_any(kConsumerBarrier, kConsumers, false)) {
      meet();
      meet();
      const int head = lane >> 2;
      scale_output(make_float2(shared.moves[head], shared.moves[head + 8]));
    }
    const uint32_t weights = shared_address(shared.weights[buffer]);
    const uint32_t tile = shared_address(shared.keys[stage]) + panel0 * kPanelBytes;
    const int line = lane & 15;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t p[4];
      load_matrices<false>(weights + line * 128 + ((2 * k + (lane >> 4)) ^ (line & 7)) * 16, p);
      const uint32_t row = tile + (16 * k + line) * 128;
#pragma unroll
      for (int panel = 0; panel < 2; ++panel) {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          uint32_t v[4];  // keys 0-7 and 8-15 of dims 8 * j on, then of the next eight
          load_matrices<true>(row + panel * kPanelBytes + ((j + (lane >> 4)) ^ (line & 7)) * 16, v);
          mma(&o[panel][4 * j], p, v[0], v[1]);
          mma(&o[panel][4 * j + 4], p, v[2], v[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void share_sums() {
    meet();
    meet();
  }
};

// ---- Kernel ---------------------------------------------------------------------------------------------------------

// The tiles of a block: rows in turn, each row's share of tiles, stages in a ring.
struct Walk {
  const int row0, step, first, last, splits;
  int stage = 0, phase = 0, turn = 0;

  __device__ __forceinline__ explicit Walk(const Params& p)
      : row0(blockIdx.x / p.splits), step(gridDim.x / p.splits), first(blockIdx.x % p.splits * p.tiles / p.splits),
        last((blockIdx.x % p.splits + 1) * p.tiles / p.splits), splits(p.splits) {}

  template <int STAGES>
  __device__ __forceinline__ void advance() {
    turn ^= 1;
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

template <int HEADS>
__device__ __forceinline__ void produce(Shared<HEADS>& shared, const Params& params, Walk walk, int warp, int lane) {
  Gather gather(params, shared.arriving[warp], walk.row0, walk.step, walk.first, walk.last, warp, lane);
  for (int row = walk.row0; row < params.rows; row += walk.step) {
    for (int tile = walk.first; tile < walk.last; ++tile, walk.advance<kStages<HEADS>>()) {
      mbarrier_wait(shared_address(&shared.empty[walk.stage]), walk.phase ^ 1);
      uint32_t present = __ballot_sync(0xFFFFFFFFu, gather.exists()) & 0x11111111u;  // a key's bit at its first lane
      present = (present | present >> 3) & 0x03030303u;
      present = (present | present >> 6) & 0x000F000Fu;
      if (lane == 0) shared.present[walk.stage][warp] = present | present >> 12;
      gather.decode(shared_address(shared.keys[walk.stage]));
      if (HEADS == 64) fence_async();
      mbarrier_arrive(shared_address(&shared.full[walk.stage]));
      gather.advance();  // after the tile is handed over
    }
  }
  copy_async_wait();  // what was asked for past the last tile
  if (walk.splits > 1) {
    cluster_sync();
    cluster_meet();
  }
}

template <class C, int HEADS>
__device__ __forceinline__ void consume(Shared<HEADS>& shared, const Params& params, Walk walk, int warp, int lane) {
  C consumer(shared, params, warp, lane, blockIdx.y * HEADS);
  for (int row = walk.row0; row < params.rows; row += walk.step) {
    consumer.start(row);
    consumer.begin();
    for (int tile = walk.first; tile < walk.last; ++tile, walk.advance<kStages<HEADS>>()) {
      mbarrier_wait(shared_address(&shared.full[walk.stage]), walk.phase);
      consumer.attend(walk.stage, walk.turn);
      mbarrier_arrive(shared_address(&shared.empty[walk.stage]));
    }
    consumer.share_sums();  // its barrier also says that every warp is through with the tiles
    if (walk.splits == 1) {
      consumer.finish_alone(row);
    } else {
      consumer.finish_together(row, walk.splits);
    }
  }
}

// Grid: x, rows times splits (a cluster's blocks are a row's splits), or as many blocks as the card holds, which take
// row after row so that a row's gathers run under the previous row's end; y, tiles of heads.
template <int HEADS>
__global__ void __launch_bounds__(kConsumers + kProducers, 1)
    sparse_attention_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<HEADS>*>(memory);
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages<HEADS>; ++s) {
      mbarrier_init(shared_address(&shared.full[s]), kProducers);
      mbarrier_init(shared_address(&shared.empty[s]), kConsumers);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  let_next_kernel_start();
  wait_for_kernels_before();

  const Walk walk(params);
  // Registers move to where they are needed; four warpgroups have 512 between them.
  if constexpr (HEADS == 64) {
    if (warp >= 8) {
      give_registers<72>();
      produce(shared, params, walk, warp - 8, lane);
    } else if (warp >= 4) {
      take_registers<176>();
      consume<WideConsumer<false>>(shared, params, walk, warp, lane);
    } else {
      take_registers<192>();
      consume<WideConsumer<true>>(shared, params, walk, warp, lane);
    }
  } else {
    if (warp >= 8) {
      give_registers<104>();
      produce(shared, params, walk, warp - 8, lane);
    } else if (warp >= 4) {
      give_registers<104>();
      consume<NarrowAdder>(shared, params, walk, warp, lane);
    } else {
      take_registers<192>();
      consume<NarrowScorer>(shared, params, walk, warp, lane);
    }
  }
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <int HEADS>
cudaError_t launch(const Params& params, int multiprocessors, bool early, cudaStream_t stream) {
  const int head_tiles = (params.heads + HEADS - 1) / HEADS;
  const int room = multiprocessors / head_tiles > 0 ? multiprocessors / head_tiles : 1;
  const bool all = params.splits > 1 || params.rows < room;
  const dim3 blocks(all ? params.rows * params.splits : room, head_tiles);
  return launch_kernel(sparse_attention_kernel<HEADS>, params, blocks, kConsumers + kProducers, sizeof(Shared<HEADS>),
                       early, stream, params.splits);
}

// ---- Interface ------------------------------------------------------------------------------------------------------

}  // namespace

// Returns a cudaError_t, 0 for success. `tile_heads` is 16 or 64; `splits` 1 to 16, above 8 only where the device
// grants such clusters.
extern "C" int csa2_sparse_attention(const void* q, int64_t q_row, int64_t q_head, const void* swa,
                                     const void* swa_slots, int64_t swa_row, int swa_wide, const void* main,
                                     const void* main_slots, int64_t main_row, int main_wide, const void* sink,
                                     void* out, int rows, int heads, int window, int topk, float scale, int tile_heads,
                                     int splits, int multiprocessors, int early, void* stream) {
  Params p = {};
  p.q = static_cast<const __nv_bfloat16*>(q), p.q_row = q_row, p.q_head = q_head;
  p.swa = static_cast<const uint8_t*>(swa), p.swa_slots = swa_slots, p.swa_row = swa_row, p.swa_wide = swa_wide;
  p.main = static_cast<const uint8_t*>(main), p.main_slots = main_slots, p.main_row = main_row;
  p.main_wide = main_wide;
  p.sink = static_cast<const float*>(sink), p.out = static_cast<__nv_bfloat16*>(out);
  p.heads = heads, p.window = window, p.topk = topk;
  p.swa_tiles = (window + kTileKeys - 1) / kTileKeys;
  p.tiles = p.swa_tiles + (topk + kTileKeys - 1) / kTileKeys;
  p.rows = rows, p.splits = splits;
  p.scale_log2 = scale * kLog2E * kUnshift;
  const auto on = static_cast<cudaStream_t>(stream);
  if (rows < 1 || heads < 1 || splits < 1 || splits > kMaxSplits) return cudaErrorInvalidValue;
  switch (tile_heads) {
    case 16: return launch<16>(p, multiprocessors, early, on);
    case 64: return launch<64>(p, multiprocessors, early, on);
    default: return cudaErrorInvalidValue;
  }
}
