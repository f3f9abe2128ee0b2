"""The kernel of products with packed matrices, compiled by g++ (see `block_on_host`)."""

import ctypes
from collections.abc import Mapping
from pathlib import Path

from soloist.jit.source import Source
from soloist.prefill.packed_form import Form
from unit.prefill.block_on_host import PRODUCTS_IN_FLIGHT, compiled, without_shared

_SHIMS = (
    "ptx/memory.cuh", "ptx/mma.cuh", "ptx/bulk.cuh", "ptx/cluster.cuh", "ptx/dependent.cuh",
    "ptx/tensor.cuh", "ptx/transposed.cuh", "ptx/turns.cuh", "ptx/wgmma.cuh", "ptx/setmaxnreg.cuh",
    "ptx/e4m3.cuh", "ptx/pairs.cuh", "ptx/prefetch.cuh", "sync/slots.cuh",
)  # fmt: skip

_OWN = r"""
struct float2 { float x, y; };
struct TensorMap { u64 words[16]; };  // here: address, rows, columns
inline u32 swizzled(u32 row, u32 chunk) { return row * 128 + ((chunk ^ row % 8) << 4); }
inline void load_box(u32 to, const TensorMap& map, u32 column, u32 row, u32 barrier) {
  const u16* const from = reinterpret_cast<const u16*>(map.words[0]);
  const u64 rows = map.words[1], columns = map.words[2];
  if (to % 1024) std::abort();
  copies.push_back({[=] {
    for (u32 i = 0; i < kTokens; ++i)
      for (u32 c = 0; c < 64; ++c) {
        const bool is_inside = row + i < rows && column + c < columns;
        const u16 value = is_inside ? from[(row + i) * columns + column + c] : 0;
        std::memcpy(shared + to + swizzled(i, c / 8) + c % 8 * 2, &value, 2);
      }
    barrier_at(barrier).bytes -= kTokens * 128, settle(barrier_at(barrier));
  }});
}
static u32 word_left[kMost][4];
inline void store_matrices_transposed(u32 column, const u32 (&words)[4]) {
  const u32 first = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  std::memcpy(word_left[threadIdx.x], words, 16);
  __syncwarp();
  for (u32 row = 0; row < 8; ++row) {
    const u32 pair = word_left[first + row * 4 + lane % 8 / 2][lane / 8];
    const u16 value = static_cast<u16>(pair >> lane % 2 * 16);
    std::memcpy(shared + column + row * 2, &value, 2);
  }
  __syncwarp();
}
inline float number_of_e4m3(u32 code) {
  const u32 exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7F) == 0x7F) return NAN;
  const float size = exponent ? std::ldexp(8.0f + mantissa, static_cast<int>(exponent) - 10)
                              : std::ldexp(static_cast<float>(mantissa), -9);
  return code & 0x80 ? -size : size;
}
inline uint2 fp16_of_e4m3(u32 four) {
  u32 pairs[2] = {0, 0};
  for (u32 i = 0; i < 4; ++i) {
    const _Float16 value = static_cast<_Float16>(number_of_e4m3(four >> 8 * i & 0xFF));
    pairs[i / 2] |= static_cast<u32>(bits_to<u16>(value)) << 16 * (i % 2);
  }
  return {pairs[0], pairs[1]};
}
// The nearest code, of two as near the even one.
inline u8 e4m3_of(float x) {
  const u8 sign = std::signbit(x) ? 0x80 : 0;
  const float size = std::fabs(x);
  if (size != size) return 0x7F;
  if (size >= 448.0f) return sign | 0x7E;
  u8 best = 0;
  for (u8 code = 1; code < 0x7F; ++code) {
    const float off = std::fabs(number_of_e4m3(code) - size);
    const float least = std::fabs(number_of_e4m3(best) - size);
    if (off < least || (off == least && code % 2 == 0)) best = code;
  }
  return sign | best;
}
inline u16 e4m3_of_pair(float low, float high) { return e4m3_of(low) | e4m3_of(high) << 8; }
inline float __fdiv_rn(float a, float b) { return a / b; }
// Products of a group of four warps, made when they are waited for.
constexpr u32 kWgmmaDepth = 16;
// Operands are read as late as sums are made.
struct Issued { float* sums; const uint4* a; u64 b; u32 adds; bool commits; };
static std::deque<Issued> issued[kMost];
inline u64 wgmma_operand(u32 at) { return at; }
inline u64 along(u64 operand, u32 values) { return operand + values * 2; }
inline void begin_products() {}
inline void finish_operand(uint4&) {}
inline void multiply_rows(float (&s)[kTokens / 2], const uint4& a, u64 b, u32 adds) {
  issued[threadIdx.x].push_back({s, &a, b, adds, false});
}
inline void commit_products() { issued[threadIdx.x].back().commits = true; }
inline float shared_value(u64 at) {
  return from_half(load_from<u16>(static_cast<u32>(at ^ (at >> 7 & 7) << 4)));
}
// Of a product: columns, those of a lane's register, and bytes of one.
constexpr u32 kDepth = kEightBits ? 32 : 16, kLaneColumns = kDepth / 8, kColumnBytes = 32 / kDepth;
inline float value_at(u64 at) {
  if (!kEightBits) return shared_value(at);
  return number_of_e4m3(load_from<u8>(static_cast<u32>(at ^ (at >> 7 & 7) << 4)));
}
static void multiply_oldest(u32 first) {
  static float rows[64][kDepth];
  for (u32 t = 0; t < 128; ++t) {
    const Issued& own = issued[first + t].front();
    const u32 words[4] = {own.a->x, own.a->y, own.a->z, own.a->w};
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = t / 32 * 16 + t % 32 / 4 + i % 2 * 8;
      const u32 k = i / 2 * (kDepth / 2) + t % 4 * kLaneColumns;
      for (u32 c = 0; c < kLaneColumns; ++c) {
        const u32 bits = words[i] >> 8 * kColumnBytes * c;
        rows[row][k + c] = kEightBits ? number_of_e4m3(bits & 0xFF) : low_half(bits);
      }
    }
  }
  static float tokens[kTokens][kDepth];
  const u64 b = issued[first].front().b;
  for (u32 n = 0; n < kTokens; ++n)
    for (u32 k = 0; k < kDepth; ++k) tokens[n][k] = value_at(b + n * 128 + k * kColumnBytes);
  for (u32 t = 0; t < 128; ++t) {
    Issued own = issued[first + t].front();
    issued[first + t].pop_front();
    if (own.b != b) std::abort();
    for (u32 i = 0; i < kTokens / 2; ++i) {
      const u32 row = t / 32 * 16 + i / 2 % 2 * 8 + t % 32 / 4, n = i / 4 * 8 + t % 4 * 2 + i % 2;
      float sum = 0.0f;
      for (u32 k = 0; k < kDepth; ++k) sum += rows[row][k] * tokens[n][k];
      own.sums[i] = own.adds ? own.sums[i] + sum : sum;
    }
  }
}
"""

MAIN = r"""
#include "kernel.cu"

static TensorMap map;
static Product product;
static void run_thread() {
  packed_product(map, product);
  threads[threadIdx.x].ended = true;
  pause();
}
// Returns whether all blocks ended.
extern "C" int run(const u16* x, const u8* image, const u8* table, u8* out, u32 tokens, u32 columns,
                   u32 row_tiles, u32 pitch, u32 results, u32 blocks, u32 seed,
                   const float* scales) {
  random_state = seed;
  map.words[0] = reinterpret_cast<u64>(x), map.words[1] = tokens;
  map.words[2] = kEightBits ? columns / 2 : columns;  // of 16 bits
  const u32 token_tiles = (tokens + kTokens - 1) / kTokens;
  product = {image, reinterpret_cast<const Half*>(table), out, tokens, token_tiles,
             token_tiles * row_tiles * kParts, pitch, results, nullptr, nullptr, 0, scales};
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    if (!run_block(run_thread, kPackedThreads)) return 0;
    for (const auto& own : issued) if (!own.empty()) return 0;
  }
  return 1;
}
"""


GROUPED_MAIN = (
    MAIN
    + r"""
// The same of rows that lie expert by expert.
extern "C" int run_grouped(const u16* x, const u8* image, const u8* table, u8* out,
                           const u32* number, const Piece* pieces, u32 rows, u32 columns,
                           u32 row_tiles, u32 results, u32 blocks, u32 seed, u64 expert_bytes) {
  random_state = seed;
  map.words[0] = reinterpret_cast<u64>(x), map.words[1] = rows, map.words[2] = columns;
  product = {image, reinterpret_cast<const Half*>(table), out, rows, 0, row_tiles, results, results,
             number, pieces, expert_bytes};
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    if (!run_block(run_thread, kPackedThreads)) return 0;
    for (const auto& own : issued) if (!own.empty()) return 0;
  }
  return 1;
}
"""
)

EXPERT_ROWS_MAIN = r"""
#define __shared__ static
#include "world.h"
inline u32 atomicAdd(u32* at, u32 x) { return std::exchange(*at, *at + x); }
#include "kernel.cu"

static std::function<void()> thread_of_block;
static void run_any_thread() {
  thread_of_block();
  threads[threadIdx.x].ended = true;
  pause();
}
extern "C" int run_route(const u16* x, const float4* router, float* logits, u32 tokens) {
  thread_of_block = [=] { route(x, router, logits, tokens); };
  const u32 blocks = (tokens + kRoutedTokens - 1) / kRoutedTokens * kExpertGroups;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    if (!run_block(run_any_thread, 256)) return 0;
  return 1;
}
extern "C" int run_choose(const float* logits, const float* correction, i64* experts, float* shares,
                          u32 tokens) {
  thread_of_block = [=] { choose(logits, correction, experts, shares, tokens); };
  for (blockIdx.x = 0; blockIdx.x * kChoosingWarps < tokens; ++blockIdx.x)
    if (!run_block(run_any_thread, kChoosingWarps * 32)) return 0;
  return 1;
}
extern "C" int run_cut(const i64* chosen, u32* number, Piece* pieces, i32* row_of, i32* token_of,
                       u32 slots, u32 rows) {
  thread_of_block = [=] { cut(chosen, slots, rows, number, pieces, row_of, token_of); };
  return run_block(run_any_thread, kCutWarps * 32);
}
extern "C" void run_take(const u16* x, const i32* token_of, uint4* out, u32 count) {
  for (blockIdx.x = 0; blockIdx.x <= count / 256; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < 256; ++threadIdx.x) take(x, token_of, out, count);
}
extern "C" void run_add_shares(const float4* given, const i32* row_of, const float* shares,
                               void* out, u32 tokens, u32 wide) {
  for (blockIdx.x = 0; blockIdx.x < tokens; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < 256; ++threadIdx.x)
      add_shares(given, row_of, shares, out, wide);
}
"""

ROWS_MAIN = r"""
#include "world.h"
#include "kernel.cu"

extern "C" void run_arrange(const u16* x, const u16* columns, uint4* out, u32 row_values,
                            u32 count) {
  for (blockIdx.x = 0; blockIdx.x <= count / 256; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < 256; ++threadIdx.x)
      arrange(x, columns, out, row_values, count);
}
extern "C" void run_add_parts(const float4* parts, uint2* out, u32 num_parts, u32 count, u32 wide) {
  for (blockIdx.x = 0; blockIdx.x <= count / 1024; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < 256; ++threadIdx.x)
      add_parts(parts, out, num_parts, count, wide);
}
extern "C" u32 place_of_word(u32 word) { return arranged_word(word); }
extern "C" void run_look_up(const u8* image, const Half* table, const i32* ids, float4* residual,
                            u32 row_values, u32 tokens) {
  for (blockIdx.x = 0; blockIdx.x < tokens; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < 256; ++threadIdx.x)
      look_up(image, table, ids, residual, row_values);
}
"""

UNPACK_MAIN = r"""
#include "world.h"
#include "kernel.cu"

extern "C" void run_unpack(const u8* image, const Half* table, const u16* columns, u16* out,
                           u32 rows, u32 row_values, u32 more_rows, u32 fragments) {
  for (blockIdx.x = 0; blockIdx.x < fragments; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < kUnpackingWarps * 32; ++threadIdx.x)
      unpack(image, table, columns, out, rows, row_values, more_rows);
}
"""

QUANTIZE_MAIN = r"""
#define __shared__ static
#include "world.h"
#include "kernel.cu"

static std::function<void()> thread_of_block;
static void run_any_thread() {
  thread_of_block();
  threads[threadIdx.x].ended = true;
  pause();
}
extern "C" int run_quantize(const u16* x, const u16* columns, uint4* codes, float* scales,
                            u32 tokens, u32 row_values, u32 arranged) {
  thread_of_block = [=] { quantize_rows(x, columns, codes, scales, row_values, arranged); };
  for (blockIdx.x = 0; blockIdx.x < tokens; ++blockIdx.x)
    if (!run_block(run_any_thread, kThreads)) return 0;
  return 1;
}
"""

NUMBERS_MAIN = r"""
#include "world.h"
#include "tile/fragments.cuh"

// Four codes, a byte each, times every scale.
extern "C" void run_numbers(u32 codes, uint2* out) {
  for (u32 scale = 0; scale < 1 << 16; ++scale) out[scale] = numbers_of(codes, twice(scale), 0u);
}
"""

_NO_PRODUCT = (
    "constexpr unsigned kPackedThreads = 256u, kTokens = 8u;\nconstexpr bool kEightBits = false;\n"
)


def built(form: Form, folder: Path, changes: Mapping[str, str] | None = None) -> ctypes.CDLL:
    """The kernel of a form, with mistakes: what stands in its text, and what in that place."""
    header = form.source.header
    header = header[: header.index("__device__ __forceinline__ void multiply_rows")]
    main = GROUPED_MAIN if form.grouped else MAIN
    text = without_shared(form.source.text)
    for right, wrong in (changes or {}).items():
        assert text.count(right) == 1, "one place"
        text = text.replace(right, wrong)
    return _compiled(header, text, main, folder)


def built_rows(source: Source, folder: Path) -> ctypes.CDLL:
    """The kernels of `rows_source`."""
    header = source.header + _NO_PRODUCT
    return _compiled(header, source.text, ROWS_MAIN, folder)


def built_unpack(source: Source, folder: Path, arch: int | None = None) -> ctypes.CDLL:
    """The kernel of `unpack_source`; as an older GPU computes where an `arch` is given."""
    older = "" if arch is None else f"#define __CUDA_ARCH__ {arch}\n"
    return _compiled(source.header + older + _NO_PRODUCT, source.text, UNPACK_MAIN, folder)


def built_quantize(source: Source, folder: Path) -> ctypes.CDLL:
    """The kernel of `quantize_source`."""
    return _compiled(source.header + _NO_PRODUCT, source.text, QUANTIZE_MAIN, folder)


def built_numbers(source: Source, folder: Path) -> ctypes.CDLL:
    """What becomes of codes, of the same source."""
    return _compiled(source.header + _NO_PRODUCT, "", NUMBERS_MAIN, folder)


def built_expert_rows(source: Source, folder: Path) -> ctypes.CDLL:
    """The kernels of `expert_rows_source`."""
    header = source.header + _NO_PRODUCT
    return _compiled(header, source.text, EXPERT_ROWS_MAIN, folder)


def _compiled(header: str, kernel: str, main: str, folder: Path) -> ctypes.CDLL:
    return compiled(
        header,
        kernel,
        main,
        folder,
        own=_OWN + PRODUCTS_IN_FLIGHT,
        shims=_SHIMS,
        tiles=(
            "arranged",
            "fragment_places",
            "fragment_scales",
            "fragment_super_blocks",
            "fragments",
            "silu",
        ),
    )
