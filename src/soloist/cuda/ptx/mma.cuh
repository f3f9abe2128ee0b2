// Matrix multiply-accumulate m16n8k16 with fp32 sums, and arithmetic and conversions of 16-bit types.
#pragma once
#include "ptx/types.cuh"
#include "spec.cuh"

template <bool kOfBf16 = kBf16>
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (kOfBf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Without earlier sums: nobody has to put zeros there.
template <bool kOfBf16 = kBf16>
__device__ __forceinline__ void mma_from_zero(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#define SOLOIST_MMA(type)                                                                                           \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " \
               "{%10,%10,%10,%10};"                                                                                 \
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                     \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f))
  if constexpr (kOfBf16) SOLOIST_MMA("bf16");
  else SOLOIST_MMA("f16");
#undef SOLOIST_MMA
}

// An operand that nobody looks at the results of: whatever its register holds.
__device__ __forceinline__ u32 any_register() {
  u32 x;
  asm volatile("" : "=r"(x));
  return x;
}

// Of integers of 8 bits, m16n8k32: those of `a` and of `b` signed or not; d = a b + c.
template <bool kSigned, bool kSignedB = true>
__device__ __forceinline__ void mma(i32 (&d)[4], uint4 a, u32 b0, u32 b1, const i32 (&c)[4]) {
#define SOLOIST_MMA(types)                                                                                                 \
  asm("mma.sync.aligned.m16n8k32.row.col.s32." types ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"      \
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                                                     \
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]))
  if constexpr (kSigned && kSignedB) SOLOIST_MMA("s8.s8");
  else if constexpr (kSigned) SOLOIST_MMA("s8.u8");
  else if constexpr (kSignedB) SOLOIST_MMA("u8.s8");
  else SOLOIST_MMA("u8.u8");
#undef SOLOIST_MMA
}

// Two signed integers of 16 bits times the lower or upper two unsigned bytes of `b`, added to `c`.
__device__ __forceinline__ i32 dot2(u32 a, u32 b, bool upper, i32 c) {
  i32 r;
  if (upper) asm("dp2a.hi.s32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  else asm("dp2a.lo.s32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// A byte as a signed integer.
__device__ __forceinline__ i32 signed_byte(u32 x, u32 byte) {
  u32 r;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(x), "r"(0x8880 + 0x1111 * byte));
  return static_cast<i32>(r);
}

// a b + c of pairs of bf16. What is exact in bf16 comes out exact, also where an operand is below the normal numbers.
__device__ __forceinline__ u32 fma_bf16(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// (x ^ flipped) & kept, in one instruction: of two constants the compiler makes two.
template <u32 kFlipped, u32 kKept>
__device__ __forceinline__ u32 flip_and_keep(u32 x) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(r) : "r"(x), "r"(kFlipped), "n"(kKept));
  return r;
}

// Of pairs of the model's 16-bit numbers the larger magnitudes, with any sign. A NaN is larger than all others.
__device__ __forceinline__ u32 larger_magnitudes(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 860
  u32 r;
  if constexpr (kBf16) asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  return __vmaxu2(a & 0x7FFF7FFF, b & 0x7FFF7FFF);
#endif
}

// Two fp32 values as a packed pair of fp16, `low` in the low half; round to nearest even.
__device__ __forceinline__ u32 pack_fp16(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// The same of the 16-bit type of the model.
__device__ __forceinline__ u32 pack_pair(float low, float high) {
  u32 r;
  if constexpr (kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    r = pack_fp16(low, high);
  }
  return r;
}
__device__ __forceinline__ u16 to_half(float x) { return static_cast<u16>(pack_pair(x, 0.0f)); }
__device__ __forceinline__ float from_fp16(u16 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}
__device__ __forceinline__ float from_half(u16 x) {
  if constexpr (kBf16) return __uint_as_float(static_cast<u32>(x) << 16);
  return from_fp16(x);
}
__device__ __forceinline__ float low_half(u32 pair) { return from_half(static_cast<u16>(pair)); }
__device__ __forceinline__ float high_half(u32 pair) { return from_half(static_cast<u16>(pair >> 16)); }
__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
