// Sparse decode attention over packed KV records on Hopper (sm_90a). The contract is in cuda_sparse_attention.py.
//
// Work. A thread block takes rows (query tokens) one after another, a tile of HEADS heads and one share (split) of a
// row's tiles of 64 keys. Splits of a row are the blocks of one cluster: they combine through distributed shared memory,
// in one launch and without scratch.
//
// Layout. Keys are decoded once, to bf16, into a tile [64 keys][512 dims] that serves as K and as V: eight panels of
// 64 dims, each [64 keys][128 bytes] with the 128-byte swizzle that wgmma reads. Both products are transposed, so that
// wgmma's M = 64 is full for any number of heads and the heads are its N:
//
//     S^T [64 keys, HEADS]  = K [64 keys, 512] Q^T           A is the tile, K-major
//     O^T [512 dims, HEADS] = V^T [512, 64 keys] P^T         A is the same tile, MN-major
//
// Order of dims. In every aligned group of 8 dims the tile, Q and O hold 0 4 1 5 2 6 3 7, the order in which nibbles
// fall out of a 32-bit word in pairs. Q is permuted as it is loaded, O as it is stored.
//
// Scale. Decoded values carry a factor 2^-16 (an e4m3 scale times the 2^126 that e2m1 bits need would overflow bf16);
// scores and outputs are multiplied by 2^16. Both steps are exact.
//
// Roles. Warpgroups 2 and 3 gather records and decode them, 0 and 1 multiply. With 32 or 64 heads these two share every
// tile: each scores half of the heads and keeps half of the dims of O. With 8 or 16 heads a tile is too little work to
// meet over: they take alternate tiles, each with its own softmax and O, and merge once per row.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

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

enum NamedBarrier { kConsumerBarrier = 1, kScoreBarrier = 2 };  // 0 is __syncthreads; one score barrier per warpgroup

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

// ---- PTX ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

// An fma with -0 rounds once and keeps the sign of a zero; subnormal inputs count.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}

__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16 bytes of a record, or zeros.
__device__ __forceinline__ uint4 load_if(bool wanted, const uint8_t* p) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(int(wanted)));
  return v;
}

__device__ __forceinline__ uint32_t load_pair_if(bool wanted, const uint8_t* p) {
  uint32_t v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.u16 %0, [%1];\n}\n"
      : "=&r"(v)
      : "l"(p), "r"(int(wanted)));
  return v;
}

__device__ __forceinline__ void prefetch(const uint8_t* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Four 8x8 matrices (two for HEADS = 8), transposed on the way: lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}

// Makes this thread's shared stores visible to wgmma; a barrier must follow.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni DONE;\n"
      "bra.uni WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Nothing written before is read after: only time is ordered.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The address of `address` in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t remote_address(uint32_t address, uint32_t rank) {
  uint32_t d;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(address), "r"(rank));
  return d;
}

__device__ __forceinline__ float load_remote(uint32_t address) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float4 load_remote4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------

// 128-byte swizzle. K-major: 8 rows of 128 bytes are 1024 bytes apart. MN-major, one panel wide: 8 k-rows likewise.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  constexpr uint64_t stride = 1024 >> 4;
  return static_cast<uint64_t>(address >> 4) | stride << 16 | stride << 32 | uint64_t{1} << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// D [64, N] (+)= A [64, 16] B [16, N], both from shared memory; A K-major, or MN-major where TRANSPOSED.
template <bool TRANSPOSED>
__device__ __forceinline__ void wgmma(float (&d)[4], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, %7, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(accumulate), "n"(int(TRANSPOSED)));
}

template <bool TRANSPOSED>
__device__ __forceinline__ void wgmma(float (&d)[8], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, %11, "
      "0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "l"(a), "l"(b), "r"(accumulate), "n"(int(TRANSPOSED)));
}

template <bool TRANSPOSED>
__device__ __forceinline__ void wgmma(float (&d)[16], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, %16, %17, p, 1, 1, %19, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(accumulate), "n"(int(TRANSPOSED)));
}

template <bool TRANSPOSED>
__device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, "
      "1, %35, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(accumulate), "n"(int(TRANSPOSED)));
}

// ---- Records to bf16 ------------------------------------------------------------------------------------------------

// Eight e2m1 of a word -> 16 bytes of the tile. One multiplication puts a nibble `s ee m` twice, its sign on bit 15 and
// its magnitude on bits 8-6, which is the value times 2^-126; the bf16 product with `scale` undoes that.
__device__ __forceinline__ void decode_e2m1(uint32_t word, uint32_t scale, uint32_t address) {
  constexpr uint32_t kKeep = 0x81C081C0u;
  const uint32_t high = word >> 8;
  const uint32_t a = ((word & 0x000F000Fu) * 0x1040u) & kKeep;
  const uint32_t b = ((word & 0x00F000F0u) * 0x0104u) & kKeep;
  const uint32_t c = ((high & 0x000F000Fu) * 0x1040u) & kKeep;
  const uint32_t d = ((high & 0x00F000F0u) * 0x0104u) & kKeep;
  store_shared(address, mul_bf16x2(a, scale), mul_bf16x2(b, scale), mul_bf16x2(c, scale), mul_bf16x2(d, scale));
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

// A ue8m0 scale (low byte) -> bf16x2, times 2^(120 - 16).
__device__ __forceinline__ uint32_t ue8m0_scale(uint32_t byte) { return min((byte & 0xFFu) + 104u, 254u) * 0x00800080u; }

// Brings tiles of 64 keys in, eight warps with eight keys each. Four lanes share a key: of every 64 bytes of its record
// each loads 16. In a store's quarter-warp the keys differ and the dims agree, so that the swizzle spreads the lanes
// over all banks. A register that was decoded is loaded again at once, for the next tile; the records of the tile after
// that are on their way to L2, and its successor's slots to registers.
struct Gather {
  const Params& params;
  const int step;  // from one row of this block to the next
  const int first, last;
  int row, tile;  // the next slots to load
  const int block, key, quarter;
  bool swa, next_swa, ahead_swa;  // the kinds of records in `raw`, under `next`, of `ahead`
  bool have;                      // `next` names a record
  uint32_t present, next_present;  // bit k: key k of this warp exists
  int ahead;                       // slot
  const uint8_t* next;
  uint4 raw[8];
  uint32_t scales[4];

  __device__ __forceinline__ Gather(const Params& p, int row, int step, int first, int last, int warp, int lane)
      : params(p), step(step), first(first), last(last), row(row), tile(first), block(warp), key(lane & 7),
        quarter(lane >> 3) {
    load_slot();
    advance();
#pragma unroll
    for (int i = 0; i < 8; ++i) reload(i);
    reload_scales();
    swa = next_swa, present = next_present;
    advance();
  }

  // A slot's low word: int64 slots are little-endian, and no pool has 2^31.
  __device__ __forceinline__ void load_slot() {
    ahead_swa = tile < params.swa_tiles;
    const int width = ahead_swa ? params.window : params.topk;
    const int wide = ahead_swa ? params.swa_wide : params.main_wide;
    const void* table = ahead_swa ? params.swa_slots : params.main_slots;
    const int64_t start = row * (ahead_swa ? params.swa_row : params.main_row);
    const int column = (ahead_swa ? tile : tile - params.swa_tiles) * kTileKeys + block * 8 + key;
    ahead = -1;
    if (row < params.rows && tile < last && column < width) {
      ahead = __ldg(static_cast<const int*>(table) + ((start + column) << wide));
    }
    if (++tile >= last) row += step, tile = first;
  }

  // `ahead` becomes `next`: its record goes to L2, and the slot after it is loaded.
  __device__ __forceinline__ void advance() {
    next_swa = ahead_swa, have = ahead >= 0;
    next_present = __ballot_sync(0xFFFFFFFFu, have) & 0xFFu;
    const int64_t slot = ahead;
    next = next_swa ? params.swa + slot * kSwaBytes : params.main + slot * kMainBytes;
    if (have) {
      if (next_swa) {
#pragma unroll
        for (int i = 0; i < 4; ++i) prefetch(next + (quarter * 4 + i) * 32);
        prefetch(next + kDims);
      } else if (quarter < 3) {
#pragma unroll
        for (int i = 0; i < 3; ++i) prefetch(next + (quarter * 3 + i) * 32);
      }
    }
    load_slot();
  }

  __device__ __forceinline__ void reload(int i) {
    raw[i] = load_if(have && (i < 4 || next_swa), next + 64 * i + 16 * quarter);
  }

  __device__ __forceinline__ void reload_scales() {
    if (next_swa) {
      const uint4 s = load_if(have, next + kDims);
      scales[0] = s.x, scales[1] = s.y, scales[2] = s.z, scales[3] = s.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) scales[i] = load_pair_if(have, next + kDims / 2 + 8 * i + 2 * quarter);
    }
  }

  // Decodes this warp's keys into the tile at `base` and brings the next tile's in.
  __device__ __forceinline__ void decode(uint32_t base) {
    const uint32_t row = base + (block * 8 + key) * 128;
    if (swa) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // panel i: 16 dims from 16 * quarter on
        const uint32_t scale = ue8m0_scale(scales[i / 2] >> (16 * (i % 2) + 8 * (quarter >> 1)));
        const uint4 v = raw[i];
        decode_e4m3(v.x, v.y, scale, row + i * kPanelBytes + ((2 * quarter) ^ key) * 16);
        decode_e4m3(v.z, v.w, scale, row + i * kPanelBytes + ((2 * quarter + 1) ^ key) * 16);
        reload(i);
      }
    } else {
      const uint32_t panel = row + (quarter >> 1) * kPanelBytes;
      const int chunk = (quarter & 1) * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // panel 2 * i + quarter / 2: 32 dims from 32 * (quarter % 2) on
        const uint32_t pair = e4m3_scales(scales[i]);
        const uint32_t low = prmt(pair, pair, 0x1010), high = prmt(pair, pair, 0x3232);
        const uint32_t address = panel + 2 * i * kPanelBytes;
        const uint4 v = raw[i];
        decode_e2m1(v.x, low, address + ((chunk + 0) ^ key) * 16);
        decode_e2m1(v.y, low, address + ((chunk + 1) ^ key) * 16);
        decode_e2m1(v.z, high, address + ((chunk + 2) ^ key) * 16);
        decode_e2m1(v.w, high, address + ((chunk + 3) ^ key) * 16);
        reload(i);
      }
      if (next_swa) {
#pragma unroll
        for (int i = 4; i < 8; ++i) reload(i);
      }
    }
    reload_scales();
    swa = next_swa, present = next_present;
    advance();
  }
};

// ---- Shared memory --------------------------------------------------------------------------------------------------

// Whether the two consumer warpgroups take alternate tiles.
template <int HEADS>
constexpr bool kAlternates = HEADS <= 16;
// Tiles in shared memory.
template <int HEADS>
constexpr int kStages = kAlternates<HEADS> ? 3 : 2;

template <int HEADS>
struct alignas(1024) Shared {
  uint8_t keys[kStages<HEADS>][kTileBytes];
  uint8_t q[HEADS * kDims * 2];     // [8 panels][HEADS][128 bytes], swizzled; at a row's end O passes through
  uint8_t weights[2][HEADS * 128];  // P^T [HEADS][64 keys], swizzled: one per warpgroup where they alternate, else two
                                    // in turn, as they drift apart by a tile
  float factors[2][HEADS];          // what O is multiplied by before that tile's V^T P^T
  float peaks[2 * HEADS];           // running maxima, base 2
  float totals[2 * HEADS];          // denominators, then what O is multiplied by at the end
  float partial[2][4][HEADS];       // per warp
  uint8_t present[kStages<HEADS>][8];  // bit k of byte b: key 8 b + k of the tile exists
  uint64_t full[kStages<HEADS>], empty[kStages<HEADS>];
};

// ---- Attention of one tile ------------------------------------------------------------------------------------------

struct Max {
  __device__ __forceinline__ static float of(float a, float b) { return fmaxf(a, b); }
};
struct Sum {
  __device__ __forceinline__ static float of(float a, float b) { return a + b; }
};

// Reduces each of the thread's COLUMNS / 4 columns over the eight lanes that hold it and stores them for the warp. While
// several values are left, lanes trade halves instead of everything.
template <class Op, int COLUMNS>
__device__ __forceinline__ void reduce_columns(float (&v)[COLUMNS / 4], int lane, float* partial) {
  int index = 0, count = COLUMNS / 4;
#pragma unroll
  for (int mask = 16; mask >= 4; mask >>= 1) {
    if (count > 1) {
      count /= 2;
      const bool upper = lane & mask;
#pragma unroll
      for (int i = 0; i < COLUMNS / 8; ++i) {
        if (i >= count) break;
        const float send = upper ? v[i] : v[i + count];
        const float keep = upper ? v[i + count] : v[i];
        v[i] = Op::of(keep, __shfl_xor_sync(0xFFFFFFFFu, send, mask));
      }
      index += upper ? count : 0;
    } else {
      v[0] = Op::of(v[0], __shfl_xor_sync(0xFFFFFFFFu, v[0], mask));
    }
  }
#pragma unroll
  for (int i = 0; i < COLUMNS / 8; ++i) {
    if (i >= count) break;
    // Value i is column 8 * (i / 2) + i % 2 of those from 2 * (lane % 4) on.
    partial[(index + i) / 2 * 8 + (index + i) % 2 + 2 * (lane & 3)] = v[i];
  }
}

// Where lane `lane` points stmatrix: rows are heads of `row_bytes`, swizzled chunks of 16 bytes. Matrices 0 and 1 are
// chunks `chunk` and `chunk` + 1 of heads 8 * j on, matrices 2 and 3 those of the next eight heads.
__device__ __forceinline__ uint32_t matrix_address(uint32_t base, int row_bytes, int lane, int j, int chunk) {
  const int head = (j + (lane >> 4)) * 8 + (lane & 7);
  return base + head * row_bytes + ((chunk + ((lane >> 3) & 1)) ^ (head & 7)) * 16;
}

template <int HEADS>
struct Consumer {
  static constexpr bool kAlternate = kAlternates<HEADS>;
  static constexpr int kColumns = kAlternate ? HEADS : HEADS / 2;  // heads that a warpgroup scores
  static constexpr int kOwnPanels = kAlternate ? 8 : 4;            // of O, that it accumulates
  Shared<HEADS>& shared;
  const Params& params;
  const float scale_log2;
  const int group, thread, warp, lane;  // within the warpgroup
  const int head0;                      // of the tile of heads
  float o[kOwnPanels][HEADS / 2];       // O^T: panels 4 * group on, or all
  float sums[kColumns / 4];             // this thread's share of the denominators

  __device__ __forceinline__ Consumer(Shared<HEADS>& s, const Params& p, int group, int thread, int head0)
      : shared(s), params(p), scale_log2(p.scale_log2), group(group), thread(thread), warp(thread / 32),
        lane(thread % 32), head0(head0) {}

  __device__ __forceinline__ void meet() const { barrier_sync(kConsumerBarrier, kConsumers); }
  __device__ __forceinline__ void meet_group() const { barrier_sync(kScoreBarrier + group, 128); }
  __device__ __forceinline__ int index() const { return group * 128 + thread; }

  // Loads a row's Q and clears the sums. Q must be free; a consumer barrier is inside.
  __device__ __forceinline__ void start(int row) {
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
        const int head = (b + i) * 4 + index() / 64, chunk = index() % 64;
        v[i] = make_uint4(0, 0, 0, 0);
        if (head < heads) v[i] = __ldg(reinterpret_cast<const uint4*>(source + head * params.q_head + chunk * 8));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int head = (b + i) * 4 + index() / 64, chunk = index() % 64;
        const uint32_t at = target + chunk / 8 * (HEADS * 128) + head * 128 + ((chunk % 8) ^ (head & 7)) * 16;
        store_shared(at, prmt(v[i].x, v[i].z, 0x5410), prmt(v[i].x, v[i].z, 0x7632), prmt(v[i].y, v[i].w, 0x5410),
                     prmt(v[i].y, v[i].w, 0x7632));
      }
    }
    if (index() < 2 * HEADS) shared.peaks[index()] = kNoPeak;
#pragma unroll
    for (int p = 0; p < kOwnPanels; ++p) {
#pragma unroll
      for (int i = 0; i < HEADS / 2; ++i) o[p][i] = 0;
    }
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) sums[i] = 0;
    fence_async();
    meet();
  }

  // This warpgroup's scores of the tile, the online softmax, its rows of P^T and its factors of O.
  __device__ __forceinline__ void score(int stage, int buffer) {
    const int column0 = kAlternate ? 0 : group * kColumns;
    float s[kColumns / 2];
    const uint64_t keys = descriptor(shared_address(shared.keys[stage]));
    const uint64_t q = descriptor(shared_address(shared.q) + column0 * 128);
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma<false>(s, keys + ((p * kPanelBytes + k * 32) >> 4), q + ((p * HEADS * 128 + k * 32) >> 4), p + k > 0);
      }
    }
    wgmma_commit();
    // This thread's keys are 16 * warp + lane / 4 and the eighth after it.
    const uint32_t present = *reinterpret_cast<const uint16_t*>(&shared.present[stage][2 * warp]) >> (lane >> 2);
    const bool first = present & 1, second = present & 0x100;
    wgmma_wait();

    float peak[kColumns / 4];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      s[4 * j + 0] = first ? s[4 * j + 0] * scale_log2 : -INFINITY;
      s[4 * j + 1] = first ? s[4 * j + 1] * scale_log2 : -INFINITY;
      s[4 * j + 2] = second ? s[4 * j + 2] * scale_log2 : -INFINITY;
      s[4 * j + 3] = second ? s[4 * j + 3] * scale_log2 : -INFINITY;
      peak[2 * j] = fmaxf(s[4 * j], s[4 * j + 2]);
      peak[2 * j + 1] = fmaxf(s[4 * j + 1], s[4 * j + 3]);
    }
    reduce_columns<Max, kColumns>(peak, lane, shared.partial[group][warp]);
    meet_group();
    float* peaks = shared.peaks + group * kColumns;
    float* factors = shared.factors[buffer] + column0;
    if (thread < kColumns) {
      const auto& partial = shared.partial[group];
      const float old = peaks[thread];
      const float now = fmaxf(fmaxf(partial[0][thread], partial[1][thread]), fmaxf(partial[2][thread], partial[3][thread]));
      const bool moves = now > old + kPeakStep;
      factors[thread] = moves ? fast_exp2(old - now) : 1.0f;
      if (moves) peaks[thread] = now;
    }
    meet_group();

    const uint32_t target = shared_address(shared.weights[buffer]) + column0 * 128;
    float2 now[kColumns / 8], factor[kColumns / 8];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      now[j] = *reinterpret_cast<const float2*>(&peaks[8 * j + 2 * (lane & 3)]);
      factor[j] = *reinterpret_cast<const float2*>(&factors[8 * j + 2 * (lane & 3)]);
    }
    uint32_t low[kColumns / 8], high[kColumns / 8];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float a = fast_exp2(s[4 * j] - now[j].x), b = fast_exp2(s[4 * j + 1] - now[j].y);
      const float c = fast_exp2(s[4 * j + 2] - now[j].x), d = fast_exp2(s[4 * j + 3] - now[j].y);
      sums[2 * j] = sums[2 * j] * factor[j].x + (a + c);
      sums[2 * j + 1] = sums[2 * j + 1] * factor[j].y + (b + d);
      low[j] = pack_bf16x2(a, b), high[j] = pack_bf16x2(c, d);
    }
    if constexpr (kColumns == 8) {
      store_matrices(matrix_address(target, 128, lane & 15, 0, 2 * warp), low[0], high[0]);
    } else {
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 2) {
        store_matrices(matrix_address(target, 128, lane, j, 2 * warp), low[j], high[j], low[j + 1], high[j + 1]);
      }
    }
    fence_async();
  }

  // O = O * factor + V^T P^T over a decoded tile.
  __device__ __forceinline__ void attend(int stage, int buffer) {
    score(stage, buffer);
    if (kAlternate) {
      meet_group();
    } else {
      meet();
    }
    scale_output(shared.factors[buffer]);
    const int panel0 = kAlternate ? 0 : group * 4;
    const uint64_t values = descriptor(shared_address(shared.keys[stage]) + panel0 * kPanelBytes);
    const uint64_t weights = descriptor(shared_address(shared.weights[buffer]));
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < kOwnPanels; ++p) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma<true>(o[p], values + ((p * kPanelBytes + k * 2048) >> 4), weights + ((k * 32) >> 4), 1);
      }
    }
    wgmma_commit();
    wgmma_wait();
  }

  __device__ __forceinline__ void scale_output(const float* factors) {
    float2 factor[HEADS / 8];
    bool moves = false;
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
      factor[j] = *reinterpret_cast<const float2*>(&factors[8 * j + 2 * (lane & 3)]);
      moves |= factor[j].x != 1.0f || factor[j].y != 1.0f;
    }
    if (__any_sync(0xFFFFFFFFu, moves)) scale_output(factor);
  }

  __device__ __forceinline__ void scale_output(const float2 (&factor)[HEADS / 8]) {
#pragma unroll
    for (int p = 0; p < kOwnPanels; ++p) {
#pragma unroll
      for (int j = 0; j < HEADS / 8; ++j) {
        o[p][4 * j] *= factor[j].x;
        o[p][4 * j + 1] *= factor[j].y;
        o[p][4 * j + 2] *= factor[j].x;
        o[p][4 * j + 3] *= factor[j].y;
      }
    }
  }

  // After the last tile: the block's denominators and peaks in the first HEADS of shared.totals and shared.peaks, and
  // its O in o[0..3], panels 4 * group on. Ends in a consumer barrier.
  __device__ __forceinline__ void gather_sums() {
    reduce_columns<Sum, kColumns>(sums, lane, shared.partial[group][warp]);
    meet_group();
    if (thread < kColumns) {
      const auto& partial = shared.partial[group];
      shared.totals[group * kColumns + thread] =
          (partial[0][thread] + partial[1][thread]) + (partial[2][thread] + partial[3][thread]);
    }
    meet();
    if constexpr (kAlternate) {
      // Both warpgroups hold all of O, over their own tiles. Under a common peak they trade halves through Q's memory.
      float2 factor[HEADS / 8];
#pragma unroll
      for (int j = 0; j < HEADS / 8; ++j) {
        const int head = 8 * j + 2 * (lane & 3);
        const float2 mine = *reinterpret_cast<const float2*>(&shared.peaks[group * HEADS + head]);
        const float2 other = *reinterpret_cast<const float2*>(&shared.peaks[(group ^ 1) * HEADS + head]);
        factor[j] = make_float2(fast_exp2(fminf(mine.x - other.x, 0.0f)), fast_exp2(fminf(mine.y - other.y, 0.0f)));
      }
      scale_output(factor);
      float* traded = reinterpret_cast<float*>(shared.q) + thread;
      if (group == 1) trade_out(traded, 0);
      meet();
      if (group == 0) trade_in(traded, 0);
      if (index() < HEADS) {
        const float a = shared.peaks[thread], b = shared.peaks[HEADS + thread], peak = fmaxf(a, b);
        shared.peaks[thread] = peak;
        shared.totals[thread] =
            shared.totals[thread] * fast_exp2(a - peak) + shared.totals[HEADS + thread] * fast_exp2(b - peak);
      }
      meet();
      if (group == 0) trade_out(traded, 4);
      meet();
      if (group == 1) trade_in(traded, 4);
      meet();
    }
  }

  __device__ __forceinline__ void trade_out(float* traded, int panel) const {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
#pragma unroll
      for (int i = 0; i < HEADS / 2; ++i) traded[(p * (HEADS / 2) + i) * 128] = o[panel ? p + kOwnPanels - 4 : p][i];
    }
  }

  __device__ __forceinline__ void trade_in(const float* traded, int panel) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
#pragma unroll
      for (int i = 0; i < HEADS / 2; ++i) {
        o[p][i] = o[panel ? p + kOwnPanels - 4 : p][i] + traded[(p * (HEADS / 2) + i) * 128];
      }
    }
  }

  __device__ __forceinline__ float sink_log2(int head) const {
    return head0 + head < params.heads ? __ldg(params.sink + head0 + head) * kLog2E : 0.0f;
  }

  // Eight dims of a head in their own order.
  __device__ __forceinline__ void store_chunk(int row, int head, int chunk, const uint4& v) const {
    if (head0 + head >= params.heads) return;
    const uint4 ordered = make_uint4(prmt(v.x, v.y, 0x5410), prmt(v.z, v.w, 0x5410), prmt(v.x, v.y, 0x7632),
                                     prmt(v.z, v.w, 0x7632));
    const int64_t line = static_cast<int64_t>(row) * params.heads + head0 + head;
    *reinterpret_cast<uint4*>(params.out + line * kDims + chunk * 8) = ordered;
  }

  // The whole row was here: O goes out through Q's memory. Ends in a consumer barrier.
  __device__ __forceinline__ void finish_alone(int row) {
    gather_sums();
    if (index() < HEADS) {
      const float total = shared.totals[index()] + fast_exp2(sink_log2(index()) - shared.peaks[index()]);
      shared.totals[index()] = kUnshift / total;
    }
    meet();
    scale_output(shared.totals);
    const uint32_t staged = shared_address(shared.q);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int chunk = (group * 4 + p) * 8 + 2 * warp;
      if constexpr (HEADS == 8) {
        store_matrices(matrix_address(staged, 1024, lane & 15, 0, chunk), pack_bf16x2(o[p][0], o[p][1]),
                       pack_bf16x2(o[p][2], o[p][3]));
      } else {
#pragma unroll
        for (int j = 0; j < HEADS / 8; j += 2) {
          store_matrices(matrix_address(staged, 1024, lane, j, chunk), pack_bf16x2(o[p][4 * j], o[p][4 * j + 1]),
                         pack_bf16x2(o[p][4 * j + 2], o[p][4 * j + 3]), pack_bf16x2(o[p][4 * j + 4], o[p][4 * j + 5]),
                         pack_bf16x2(o[p][4 * j + 6], o[p][4 * j + 7]));
        }
      }
    }
    meet();
    const int chunk = index() % 64;
#pragma unroll 4
    for (int head = index() / 64; head < HEADS; head += kConsumers / 64) {
      store_chunk(row, head, chunk, load_shared(staged + head * 1024 + (chunk ^ (head & 7)) * 16));
    }
    meet();
  }

  // fp32 O [HEADS][512], over the tiles of keys: rows of 2048 bytes whose 32-byte pieces are spread over banks.
  __device__ __forceinline__ static int spread(int head) { return ((head ^ (head >> 1)) & 3) * 32; }

  // The row's splits are this cluster: each leaves its sums in its shared memory and writes a share of the output.
  __device__ __forceinline__ void finish_together(int row, int splits) {
    const uint32_t sums_at = shared_address(shared.keys);
    gather_sums();  // its barriers also say that both warpgroups are through with the tiles
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int dim = (group * 4 + p) * 64 + 16 * warp + (lane >> 2);
#pragma unroll
      for (int i = 0; i < HEADS / 2; ++i) {
        const int head = i / 4 * 8 + 2 * (lane & 3) + i % 2;
        const uint32_t at = sums_at + head * 2048 + (((dim + (i & 2) * 4) * 4) ^ spread(head));
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(o[p][i]) : "memory");
      }
    }
    cluster_sync();

    // [splits][HEADS] each: peaks, then shares; totals.
    float* shares = reinterpret_cast<float*>(shared.weights);
    float* totals = shares + kMaxSplits * HEADS;
    for (int i = index(); i < splits * HEADS; i += kConsumers) {
      shares[i] = load_remote(remote_address(shared_address(&shared.peaks[i % HEADS]), i / HEADS));
      totals[i] = load_remote(remote_address(shared_address(&shared.totals[i % HEADS]), i / HEADS));
    }
    meet();
    if (index() < HEADS) {
      float peak = kNoPeak;
      for (int r = 0; r < splits; ++r) peak = fmaxf(peak, shares[r * HEADS + thread]);
      float total = fast_exp2(sink_log2(thread) - peak);
      for (int r = 0; r < splits; ++r) total += fast_exp2(shares[r * HEADS + thread] - peak) * totals[r * HEADS + thread];
      const float norm = kUnshift / total;
      for (int r = 0; r < splits; ++r) shares[r * HEADS + thread] = fast_exp2(shares[r * HEADS + thread] - peak) * norm;
    }
    meet();
    for (int piece = cluster_rank() * kConsumers + index(); piece < HEADS * 64; piece += splits * kConsumers) {
      const int head = piece / 64, chunk = piece % 64;
      const uint32_t at = sums_at + head * 2048 + ((chunk * 32) ^ spread(head));
      float sum[8] = {};
      for (int r0 = 0; r0 < splits; r0 += 5) {
        float4 a[5], b[5];
#pragma unroll
        for (int r = 0; r < 5; ++r) {
          // Past the last split the last one again, with no weight.
          const uint32_t there = remote_address(at, min(r0 + r, splits - 1));
          a[r] = load_remote4(there), b[r] = load_remote4(there + 16);
        }
#pragma unroll
        for (int r = 0; r < 5; ++r) {
          const float share = r0 + r < splits ? shares[(r0 + r) * HEADS + head] : 0.0f;
          sum[0] += a[r].x * share, sum[1] += a[r].y * share, sum[2] += a[r].z * share, sum[3] += a[r].w * share;
          sum[4] += b[r].x * share, sum[5] += b[r].y * share, sum[6] += b[r].z * share, sum[7] += b[r].w * share;
        }
      }
      store_chunk(row, head, chunk, make_uint4(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]),
                                               pack_bf16x2(sum[4], sum[5]), pack_bf16x2(sum[6], sum[7])));
    }
    cluster_meet();  // the others may still be reading here
  }
};

// ---- Kernel ---------------------------------------------------------------------------------------------------------

// Grid: x, rows times splits (a cluster's blocks are a row's splits), or as many blocks as the card holds, which take row
// after row so that a row's gathers run under the previous row's end; y, tiles of heads.
template <int HEADS>
__global__ void __launch_bounds__(kConsumers + kProducers, 1) sparse_attention_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<HEADS>*>(memory);
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int splits = params.splits, split = blockIdx.x % splits, step = gridDim.x / splits;
  const int first = split * params.tiles / splits, last = (split + 1) * params.tiles / splits;
  const int row0 = blockIdx.x / splits;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages<HEADS>; ++s) {
      mbarrier_init(shared_address(&shared.full[s]), kProducers);
      mbarrier_init(shared_address(&shared.empty[s]), kAlternates<HEADS> ? 128 : kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  int stage = 0, phase = 0, turn = 0;
  const auto advance = [&] {
    turn ^= 1;
    if (++stage == kStages<HEADS>) stage = 0, phase ^= 1;
  };
  if (warp >= kConsumers / 32) {
    if (HEADS == 64) asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    Gather gather(params, row0, step, first, last, warp - kConsumers / 32, lane);
    for (int row = row0; row < params.rows; row += step) {
      for (int tile = first; tile < last; ++tile, advance()) {
        mbarrier_wait(shared_address(&shared.empty[stage]), phase ^ 1);
        if (lane == 0) shared.present[stage][gather.block] = gather.present;
        gather.decode(shared_address(shared.keys[stage]));
        fence_async();
        mbarrier_arrive(shared_address(&shared.full[stage]));
      }
    }
    if (splits > 1) {
      cluster_sync();
      cluster_meet();
    }
  } else {
    if (HEADS == 64) asm volatile("setmaxnreg.inc.sync.aligned.u32 184;");
    const int group = warp / 4;
    Consumer<HEADS> consumer(shared, params, group, threadIdx.x % 128, blockIdx.y * HEADS);
    for (int row = row0; row < params.rows; row += step) {
      consumer.start(row);
      for (int tile = first; tile < last; ++tile, advance()) {
        if (kAlternates<HEADS> && turn != group) continue;
        mbarrier_wait(shared_address(&shared.full[stage]), phase);
        consumer.attend(stage, turn);
        mbarrier_arrive(shared_address(&shared.empty[stage]));
      }
      if (splits == 1) {
        consumer.finish_alone(row);
      } else {
        consumer.finish_together(row, splits);
      }
    }
  }
}

template <int HEADS>
cudaError_t launch(const Params& params, int multiprocessors, cudaStream_t stream) {
  const auto kernel = sparse_attention_kernel<HEADS>;
  const int bytes = sizeof(Shared<HEADS>), head_tiles = (params.heads + HEADS - 1) / HEADS;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && params.splits > 8) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = params.splits;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  const int room = multiprocessors / head_tiles > 0 ? multiprocessors / head_tiles : 1;
  const bool all = params.splits > 1 || params.rows < room;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(all ? params.rows * params.splits : room, head_tiles);
  config.blockDim = dim3(kConsumers + kProducers);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = params.splits > 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace

// Returns a cudaError_t, 0 for success. `tile_heads` is 8, 16, 32 or 64; `splits` 1 to 16, above 8 only where the device
// grants such clusters.
extern "C" int csa2_sparse_attention(const void* q, int64_t q_row, int64_t q_head, const void* swa,
                                     const void* swa_slots, int64_t swa_row, int swa_wide, const void* main,
                                     const void* main_slots, int64_t main_row, int main_wide, const void* sink,
                                     void* out, int rows, int heads, int window, int topk, float scale, int tile_heads,
                                     int splits, int multiprocessors, void* stream) {
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
  if (splits < 1 || splits > kMaxSplits) return cudaErrorInvalidValue;
  switch (tile_heads) {
    case 8: return launch<8>(p, multiprocessors, on);
    case 16: return launch<16>(p, multiprocessors, on);
    case 32: return launch<32>(p, multiprocessors, on);
    case 64: return launch<64>(p, multiprocessors, on);
    default: return cudaErrorInvalidValue;
  }
}
