// Stands in for ptx.cuh and CUDA, so that a kernel's source without its launch section runs on a CPU.
//
// Every thread of a cluster is a fiber; what threads do together (barriers, shuffles, matrix instructions) are gates
// where fibers wait for each other. The order of fibers follows EMULATION_SEED, so that a missing barrier has a chance
// to show. Products read shared memory when they are issued. Timing, memory ordering and the asynchronous proxy are not
// modelled.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__
#define __align__(n)

using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaErrorInvalidValue = 1;
constexpr int kDeadlock = 999;
using std::max;
using std::min;

struct int2 {
  int x, y;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace emulation {

constexpr int kMaxThreads = 1024;
constexpr size_t kSharedBytes = 227 << 10;

struct Gate {
  int arrived = 0;
  volatile int generation = 0;
};

struct Barrier {
  int count = 0, arrived = 0, bytes = 0;  // of copies that it still waits for
  volatile int phase = 0;
};

struct Block;

struct Copy {
  uint32_t target;
  const void* source;
  int bytes;
};

struct Fiber {
  ucontext_t context;
  std::vector<Copy> copies;  // on their way
  std::vector<char> stack;
  int thread;
  Block* block;
  volatile int* waits_on = nullptr;  // until it is no longer `seen`
  int seen = 0;
  int met = -1;  // generation of the cluster's gate at which it arrived, until it has waited
  bool done = false;
};

struct Warp {
  Gate gate;
  uint32_t values[32][8];
};

struct Group {
  Gate gate;
  uint32_t values[128][4];
};

struct Cluster {
  std::deque<Block> blocks;
  Gate gate;
};

struct Block {
  int x, y, rank;
  Cluster* cluster;
  uint8_t* shared;
  Gate all, named[16];
  int said_yes[16] = {};
  Warp warps[kMaxThreads / 32];
  Group groups[kMaxThreads / 128];
  std::map<uint32_t, Barrier> barriers;
  std::vector<Fiber> fibers;
};

inline Fiber* current;
inline ucontext_t scheduler;
inline std::function<void()> kernel;
inline int grid_x, threads;  // blocks; threads of one

struct Index {
  int x, y;
};

inline void wait_on(volatile int* value) {
  current->waits_on = value;
  current->seen = *value;
  swapcontext(&current->context, &scheduler);
}

inline void pass(Gate& gate, int threads) {
  if (++gate.arrived == threads) {
    gate.arrived = 0;
    gate.generation = gate.generation + 1;
  } else {
    wait_on(&gate.generation);
  }
}

inline int lane() { return current->thread % 32; }
inline Warp& warp() { return current->block->warps[current->thread / 32]; }
inline Group& group() { return current->block->groups[current->thread / 128]; }

template <class T>
T exchange(T value, int from) {
  Warp& w = warp();
  memcpy(w.values[lane()], &value, sizeof value);
  pass(w.gate, 32);
  memcpy(&value, w.values[from], sizeof value);
  pass(w.gate, 32);
  return value;
}

inline float from_bf16(uint32_t bits) {
  bits <<= 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

// Shared addresses carry the block's rank in their high byte.
inline uint8_t* at(uint32_t address, int aligned) {
  if (address % aligned || (address & 0xFFFFFF) >= kSharedBytes) abort();
  return current->block->cluster->blocks[address >> 24].shared + (address & 0xFFFFFF);
}

// Element (row, k) of an operand, 64 rows wide where it is not K-major. Its descriptor is its address, on which the
// 128-byte swizzle acts.
inline float operand(uint64_t descriptor, int row, int k, bool k_major) {
  uint32_t address = static_cast<uint32_t>(descriptor << 4);
  address += k_major ? row / 8 * 1024 + row % 8 * 128 + k * 2 : k / 8 * 1024 + k % 8 * 128 + row * 2;
  uint16_t bits;
  memcpy(&bits, current->block->shared + (address ^ ((address >> 7 & 7) << 4)), 2);
  return from_bf16(bits);
}

// Element (row, k) of a [16, 16] A fragment that a warp's lanes left in `values`.
inline float fragment(const uint32_t* values, int stride, int row, int k) {
  const int lane = row % 8 * 4 + k % 8 / 2;
  return from_bf16(values[lane * stride + row / 8 + k / 8 * 2] >> (k % 2 * 16));
}

inline void enter() {
  kernel();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}

inline bool run(int first, int y, int splits, unsigned seed) {
  Cluster cluster;
  std::vector<Fiber*> fibers;
  for (int rank = 0; rank < splits; ++rank) {
    Block& block = cluster.blocks.emplace_back();
    block.x = first + rank, block.y = y, block.rank = rank, block.cluster = &cluster;
    block.shared = static_cast<uint8_t*>(aligned_alloc(1024, kSharedBytes));
    memset(block.shared, 0xFF, kSharedBytes);  // NaN
    block.fibers.resize(threads);
    for (int t = 0; t < threads; ++t) {
      Fiber& fiber = block.fibers[t];
      fiber.thread = t, fiber.block = &block;
      fiber.stack.resize(64 << 10);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, enter, 0);
      fibers.push_back(&fiber);
    }
  }
  srand(seed);
  const size_t strides[] = {1, 97, 509}, stride = strides[seed % 3];
  size_t live = fibers.size();
  bool moved = true;
  while (live && moved) {
    moved = false;
    const size_t offset = rand() % fibers.size();
    for (size_t i = 0; i < fibers.size(); ++i) {
      Fiber* fiber = fibers[(offset + i * stride) % fibers.size()];
      if (fiber->done || (fiber->waits_on && *fiber->waits_on == fiber->seen)) continue;
      fiber->waits_on = nullptr;
      current = fiber;
      swapcontext(&scheduler, &fiber->context);
      moved = true;
      live -= fiber->done;
    }
  }
  for (Block& block : cluster.blocks) free(block.shared);
  return live == 0;
}

// Clusters one after another.
inline cudaError_t launch(std::function<void()> body, int blocks, int block_threads, int cluster = 1) {
  kernel = std::move(body), grid_x = blocks, threads = block_threads;
  const char* seed = getenv("EMULATION_SEED");
  for (int x = 0; x < blocks; x += cluster) {
    if (!run(x, 0, cluster, seed ? atoi(seed) : 1)) return kDeadlock;
  }
  return 0;
}

}  // namespace emulation

#define threadIdx (emulation::Index{emulation::current->thread, 0})
#define blockIdx (emulation::Index{emulation::current->block->x, emulation::current->block->y})
#define gridDim (emulation::Index{emulation::grid_x, 0})

inline void __syncthreads() { emulation::pass(emulation::current->block->all, emulation::threads); }

template <class T>
T __shfl_sync(uint32_t, T value, int from) {
  return emulation::exchange(value, from);
}

template <class T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
  return emulation::exchange(value, emulation::lane() ^ mask);
}

inline uint32_t __ballot_sync(uint32_t, bool vote) {
  auto& w = emulation::warp();
  w.values[emulation::lane()][0] = vote;
  emulation::pass(w.gate, 32);
  uint32_t votes = 0;
  for (int i = 0; i < 32; ++i) votes |= w.values[i][0] << i;
  emulation::pass(w.gate, 32);
  return votes;
}

inline bool __any_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) != 0; }

inline void __syncwarp() { emulation::pass(emulation::warp().gate, 32); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(x); }
inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }

template <class T>
T __shfl_up_sync(uint32_t, T value, int by) {
  return emulation::exchange(value, emulation::lane() < by ? emulation::lane() : emulation::lane() - by);
}

namespace emulation {

// All lanes' values put together.
template <class T, class Join>
T reduce(T value, Join join) {
  Warp& w = warp();
  memcpy(w.values[lane()], &value, sizeof value);
  pass(w.gate, 32);
  T result, next;
  memcpy(&result, w.values[0], sizeof result);
  for (int i = 1; i < 32; ++i) memcpy(&next, w.values[i], sizeof next), result = join(result, next);
  pass(w.gate, 32);
  return result;
}

}  // namespace emulation

template <class T>
T __reduce_add_sync(uint32_t, T value) {
  return emulation::reduce(value, [](T a, T b) { return a + b; });
}

template <class T>
T __reduce_min_sync(uint32_t, T value) {
  return emulation::reduce(value, [](T a, T b) { return min(a, b); });
}

template <class T>
T __reduce_max_sync(uint32_t, T value) {
  return emulation::reduce(value, [](T a, T b) { return max(a, b); });
}

template <class T>
T atomicAdd(T* p, T value) {
  const T before = *p;
  *p += value;
  return before;
}

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

template <class T>
T __ldg(const T* p) {
  return *p;
}

// ---- PTX

inline uint32_t shared_address(const void* p) {
  const auto* block = emulation::current->block;
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - block->shared) | block->rank << 24;
}

inline uint32_t here(uint32_t x) { return x; }

inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t d = 0;
  for (int i = 0; i < 4; ++i) d |= static_cast<uint32_t>(bytes >> (8 * (selector >> 4 * i & 7)) & 0xFF) << 8 * i;
  return d;
}

inline uint32_t pack_bf16x2(float low, float high) { return emulation::to_bf16(low) | emulation::to_bf16(high) << 16; }

inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  using emulation::from_bf16;
  return pack_bf16x2(from_bf16(a) * from_bf16(b), from_bf16(a >> 16) * from_bf16(b >> 16));
}

inline float fast_exp2(float x) { return exp2f(x); }

inline uint4 load_if(bool wanted, const uint8_t* p) {
  uint4 v = {};
  if (wanted) memcpy(&v, p, 16);
  return v;
}

inline uint4 load_record(const uint8_t* p) { return load_if(true, p); }

inline uint32_t load_byte_if(bool wanted, const uint8_t* p) { return wanted ? *p : 0; }

template <class T>
T load_global(const T* p) {
  return *p;
}

inline int load_int(const void* p, int64_t i, int wide) { return static_cast<const int*>(p)[i << wide]; }

inline void prefetch(const uint8_t* p) { static_cast<void>(*static_cast<const volatile uint8_t*>(p)); }

inline void store_shared(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint4 v = {a, b, c, d};
  memcpy(emulation::at(address, 16), &v, 16);
}

inline void store_shared(uint32_t address, float a, float b) {
  const float2 v = {a, b};
  memcpy(emulation::at(address, 8), &v, 8);
}

inline void store_shared(uint32_t address, uint32_t a) { memcpy(emulation::at(address, 4), &a, 4); }

inline uint32_t load_shared_byte(uint32_t address) { return *emulation::at(address, 1); }

inline uint32_t load_shared_word(uint32_t address) {
  uint32_t v;
  memcpy(&v, emulation::at(address, 4), 4);
  return v;
}

inline uint4 load_shared(uint32_t address) {
  uint4 v;
  memcpy(&v, emulation::at(address, 16), 16);
  return v;
}

inline float4 load_shared_floats(uint32_t address) {
  float4 v;
  memcpy(&v, emulation::at(address, 16), 16);
  return v;
}

inline void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  auto& w = emulation::warp();
  const int lane = emulation::lane();
  w.values[lane][0] = address;
  emulation::pass(w.gate, 32);
  const uint32_t mine[] = {a, b, c, d};
  for (int m = 0; m < 4; ++m) memcpy(emulation::at(w.values[m * 8 + lane / 4][0], 16) + lane % 4 * 4, &mine[m], 4);
  emulation::pass(w.gate, 32);
}

template <bool TRANSPOSED>
void load_matrices(uint32_t address, uint32_t (&v)[4]) {
  auto& w = emulation::warp();
  const int lane = emulation::lane();
  w.values[lane][0] = address;
  emulation::pass(w.gate, 32);
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      int row = lane / 4, column = lane % 4 * 2 + i;
      if (TRANSPOSED) std::swap(row, column);
      memcpy(&pair[i], emulation::at(w.values[m * 8 + row][0], 16) + column * 2, 2);
    }
    v[m] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
  emulation::pass(w.gate, 32);
}

inline void mma(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  auto& w = emulation::warp();
  const int lane = emulation::lane();
  memcpy(w.values[lane], a, 16);
  w.values[lane][4] = b0, w.values[lane][5] = b1;
  emulation::pass(w.gate, 32);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
    for (int k = 0; k < 16; ++k) {
      const uint32_t b = w.values[column * 4 + k % 8 / 2][4 + k / 8] >> (k % 2 * 16);
      d[i] += emulation::fragment(w.values[0], 8, row, k) * emulation::from_bf16(b);
    }
  }
  emulation::pass(w.gate, 32);
}

inline void fence_async() {}
inline void barrier_sync(int id, int threads) { emulation::pass(emulation::current->block->named[id], threads); }
inline bool barrier_any(int id, int threads, bool yes) {
  int& said_yes = emulation::current->block->said_yes[id];
  said_yes += yes;
  barrier_sync(id, threads);
  const bool any = said_yes > 0;
  barrier_sync(id, threads);  // all have read it
  said_yes -= yes;
  return any;
}
inline void mbarrier_init(uint32_t barrier, int count) { emulation::current->block->barriers[barrier].count = count; }
inline void mbarrier_init_fence() {}

inline void mbarrier_settle(emulation::Barrier& b) {
  if (b.arrived < b.count || b.bytes) return;
  b.arrived = 0;
  b.phase = b.phase + 1;
}

inline void mbarrier_arrive(uint32_t barrier) {
  auto& b = emulation::current->block->barriers[barrier];
  ++b.arrived;
  mbarrier_settle(b);
}

#ifdef CSA2_EVERY_LANE_ARRIVES
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

inline void mbarrier_arrive_warp(uint32_t barrier, int lane) {
  __syncwarp();
  if (kWarpArrivals > 1 || lane == 0) mbarrier_arrive(barrier);
}

inline void mbarrier_expect(uint32_t barrier, int bytes) {
  emulation::current->block->barriers[barrier].bytes += bytes;
  mbarrier_arrive(barrier);
}

// Copies of a thread arrive when it waits for them.
template <int BYTES>
void copy_async(uint32_t target, const void* source) {
  static_assert(BYTES == 4 || BYTES == 16);
  emulation::current->copies.push_back({target, source, BYTES});
}

inline void copy_async_wait() {
  for (const auto& copy : emulation::current->copies) {
    memcpy(emulation::at(copy.target, copy.bytes), copy.source, copy.bytes);
  }
  emulation::current->copies.clear();
}

inline void bulk_copy(uint32_t target, const void* source, int bytes, uint32_t barrier) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(source) % 16) abort();
  memcpy(emulation::at(target, 16), source, bytes);
  auto& b = emulation::current->block->barriers[barrier];
  b.bytes -= bytes;
  mbarrier_settle(b);
}

inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  auto& b = emulation::current->block->barriers[barrier];
  if ((b.phase & 1) == static_cast<int>(parity)) emulation::wait_on(&b.phase);
}

inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) { mbarrier_wait(barrier, parity); }

inline void let_next_kernel_start() {}
inline void wait_for_kernels_before() {}

template <int COUNT>
void give_registers() {}
template <int COUNT>
void take_registers() {}

inline uint32_t cluster_rank() { return emulation::current->block->rank; }

inline void cluster_arrive() {
  auto* cluster = emulation::current->block->cluster;
  if (emulation::current->met >= 0) abort();
  emulation::current->met = cluster->gate.generation;
  if (++cluster->gate.arrived == static_cast<int>(cluster->blocks.size()) * emulation::threads) {
    cluster->gate.arrived = 0;
    cluster->gate.generation = cluster->gate.generation + 1;
  }
}

inline void cluster_wait() {
  auto& gate = emulation::current->block->cluster->gate;
  if (emulation::current->met < 0) abort();
  if (gate.generation == emulation::current->met) emulation::wait_on(&gate.generation);
  emulation::current->met = -1;
}

inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

inline void cluster_meet() { cluster_sync(); }
inline uint32_t remote_address(uint32_t address, uint32_t rank) { return (address & 0xFFFFFF) | rank << 24; }

inline float load_remote(uint32_t address) {
  float v;
  memcpy(&v, emulation::at(address, 4), 4);
  return v;
}

inline float4 load_remote4(uint32_t address) {
  float4 v;
  memcpy(&v, emulation::at(address, 16), 16);
  return v;
}

inline uint32_t load_remote_word(uint32_t address) {
  uint32_t v;
  memcpy(&v, emulation::at(address, 4), 4);
  return v;
}

inline void send_remote(uint32_t address, uint4 v, uint32_t barrier) {
  if (address >> 24 != barrier >> 24) abort();
  memcpy(emulation::at(address, 16), &v, 16);
  auto& b = emulation::current->block->cluster->blocks[barrier >> 24].barriers.at(barrier);
  b.bytes -= 16;
  mbarrier_settle(b);
}

// ---- wgmma

inline uint64_t descriptor(uint32_t address) { return (address & 0xFFFFFF) >> 4; }
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING, int SIZE>
void wgmma_wait_for(float (&)[SIZE]) {
  emulation::pass(emulation::group().gate, 128);
}
inline void waited_for(float (&)[32]) {}

inline void wgmma_shared(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  const int warp = emulation::current->thread % 128 / 32, lane = emulation::lane();
  emulation::pass(emulation::group().gate, 128);
  for (int i = 0; i < 32; ++i) {
    const int row = 16 * warp + lane / 4 + (i & 2) * 4, column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
    if (!accumulate) d[i] = 0;
    for (int k = 0; k < 16; ++k) d[i] += emulation::operand(a, row, k, true) * emulation::operand(b, column, k, true);
  }
}

namespace emulation {

// D (+)= A B, A in registers.
template <int SIZE>
void multiply(float (&d)[SIZE], const uint32_t (&a)[4], uint64_t b, bool k_major, bool accumulate) {
  Group& g = group();
  const int thread = current->thread % 128;
  memcpy(g.values[thread], a, 16);
  pass(g.gate, 128);
  for (int i = 0; i < SIZE; ++i) {
    const int row = lane() / 4 + (i & 2) * 4, column = i / 4 * 8 + 2 * (lane() % 4) + i % 2;
    if (!accumulate) d[i] = 0;
    for (int k = 0; k < 16; ++k) {
      d[i] += fragment(g.values[thread / 32 * 32], 4, row, k) * operand(b, column, k, k_major);
    }
  }
  pass(g.gate, 128);
}

}  // namespace emulation

inline void wgmma_registers(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  emulation::multiply(d, a, b, false, true);
}

inline void wgmma_registers(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  emulation::multiply(d, a, b, true, accumulate);
}

inline void wgmma_registers(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  emulation::multiply(d, a, b, true, accumulate);
}
