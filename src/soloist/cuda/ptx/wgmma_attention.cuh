// What a warpgroup multiplies in attention, with fp32 sums: 64 queries with 128 keys, and their weights with values of 32, 64, 96
// or 128 columns. Needs sm_90a.
//
// Queries, keys and values are operands as of ptx/wgmma.cuh, boxes of more columns one after the other. Values are read across
// their rows, or along them where a row has one column of all positions.
#pragma once
#include "ptx/wgmma.cuh"

inline constexpr u32 kScoreColumns = 128, kScores = kWgmmaRows * kScoreColumns / 128;  // of a thread

#define REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_32 \
  REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_48 \
  REGISTERS_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_64 \
  REGISTERS_48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_16(s) \
  "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]), "+f"(s[8]), \
  "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]), "+f"(s[15])
#define SUMS_32(s) \
  SUMS_16(s), "+f"(s[16]), "+f"(s[17]), \
  "+f"(s[18]), "+f"(s[19]), "+f"(s[20]), "+f"(s[21]), "+f"(s[22]), "+f"(s[23]), "+f"(s[24]), "+f"(s[25]), \
  "+f"(s[26]), "+f"(s[27]), "+f"(s[28]), "+f"(s[29]), "+f"(s[30]), "+f"(s[31])
#define SUMS_48(s) \
  SUMS_32(s), \
  "+f"(s[32]), "+f"(s[33]), "+f"(s[34]), "+f"(s[35]), "+f"(s[36]), "+f"(s[37]), "+f"(s[38]), "+f"(s[39]), \
  "+f"(s[40]), "+f"(s[41]), "+f"(s[42]), "+f"(s[43]), "+f"(s[44]), "+f"(s[45]), "+f"(s[46]), "+f"(s[47])
#define SUMS_64(s) \
  SUMS_48(s), \
  "+f"(s[48]), "+f"(s[49]), "+f"(s[50]), "+f"(s[51]), "+f"(s[52]), "+f"(s[53]), "+f"(s[54]), "+f"(s[55]), \
  "+f"(s[56]), "+f"(s[57]), "+f"(s[58]), "+f"(s[59]), "+f"(s[60]), "+f"(s[61]), "+f"(s[62]), "+f"(s[63])

#define SCORE(type) \
  asm volatile( \
      "{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type \
      " {" REGISTERS_64 "}, %64, %65, p, 1, 1, 0, 0; }" \
      : SUMS_64(s) \
      : "l"(a), "l"(b), "r"(adds))

// s = a [64, 16] bᵀ [128, 16], added to s if it `adds`; runs on by itself, sums as of `multiply_group`.
__device__ __forceinline__ void multiply_scores(float (&s)[kScores], u64 a, u64 b, u32 adds) {
  if constexpr (kBf16) {
    SCORE("bf16");
  } else {
    SCORE("f16");
  }
}
#undef SCORE

#define ADD_VALUES(type, columns, registers, operands, across, sums) \
  asm volatile( \
      "{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type \
      " {" registers "}, " operands ", p, 1, 1, " across "; }" \
      : sums \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// s += a [64, 16] b [16, columns], twice as many columns as there are sums; runs on by itself. Words of a: of the thread's rows
// l / 4 and l / 4 + 8 (lane l) columns 2 (l % 4) and one more, then the same of eight columns further. Rows of b are those of a's
// columns, or, of `add_values_along`, they are columns of s.
#define DEFINE_ADD_VALUES_OF(name, across, count, columns, operands) \
  __device__ __forceinline__ void name(float (&s)[count], const u32 (&a)[4], u64 b) { \
    if constexpr (kBf16) { \
      ADD_VALUES("bf16", columns, REGISTERS_##count, operands, across, SUMS_##count(s)); \
    } else { \
      ADD_VALUES("f16", columns, REGISTERS_##count, operands, across, SUMS_##count(s)); \
    } \
  }
#define DEFINE_ADD_VALUES(count, columns, operands) \
  DEFINE_ADD_VALUES_OF(add_values, "1", count, columns, operands) \
  DEFINE_ADD_VALUES_OF(add_values_along, "0", count, columns, operands)
DEFINE_ADD_VALUES(16, "32", "{%16, %17, %18, %19}, %20")
DEFINE_ADD_VALUES(32, "64", "{%32, %33, %34, %35}, %36")
DEFINE_ADD_VALUES(48, "96", "{%48, %49, %50, %51}, %52")
DEFINE_ADD_VALUES(64, "128", "{%64, %65, %66, %67}, %68")
#undef ADD_VALUES
#undef DEFINE_ADD_VALUES
#undef DEFINE_ADD_VALUES_OF
#undef REGISTERS_16
#undef REGISTERS_32
#undef REGISTERS_48
#undef REGISTERS_64
#undef SUMS_16
#undef SUMS_32
#undef SUMS_48
#undef SUMS_64
