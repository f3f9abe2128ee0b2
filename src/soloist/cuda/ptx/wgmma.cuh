// Matrix multiply-accumulate of a warpgroup, m64n256k16 with fp32 sums, both factors in shared memory. Needs sm_90a.
//
// Factors are boxes of ptx/tensor.cuh; each begins at a multiple of 1,024 bytes.
#pragma once
#include "ptx/types.cuh"
#include "spec.cuh"

inline constexpr u32 kWgmmaRows = 64, kWgmmaColumns = 256, kWgmmaDepth = 16;
inline constexpr u32 kWgmmaSums = kWgmmaRows * kWgmmaColumns / 128;  // of a thread

// Where an operand's rows begin, of 64 or 128 bytes and swizzled by as many, groups of eight rows one after the other. `next_box`:
// bytes to the next columns, which count only where an operand is read across its rows.
template <u32 kRowBytes = 128>
__device__ __forceinline__ u64 wgmma_operand(u32 shared, u32 next_box = 16) {
  constexpr u64 kSwizzle = kRowBytes == 128 ? 1 : 2;
  return static_cast<u64>(shared >> 4) | static_cast<u64>(next_box >> 4) << 16 |
         static_cast<u64>(8 * kRowBytes >> 4) << 32 | kSwizzle << 62;
}
// So many values further along its rows.
__device__ __forceinline__ u64 along(u64 operand, u32 values) { return operand + (values * 2 >> 4); }

// Before the first product after anybody else has touched sums.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Those since the last call are a group.
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All groups but the last so many are done, their factors read.
template <u32 kInFlight>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}
// Sums are read from here on, and not before: to be called once no product is in flight.
template <u32 kSums>
__device__ __forceinline__ void take_sums(float (&s)[kSums]) {
#pragma unroll
  for (u32 i = 0; i < kSums; ++i) asm volatile("" : "+f"(s[i])::"memory");
}

#define WGMMA(type) \
  asm volatile( \
      "{ .reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
      "%59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, " \
      "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, " \
      "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
      "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
      "}, %128, %129, p, 1, 1, 0, 0; }" \
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]), "+f"(s[8]), \
        "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]), "+f"(s[15]), "+f"(s[16]), \
        "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]), "+f"(s[21]), "+f"(s[22]), "+f"(s[23]), "+f"(s[24]), \
        "+f"(s[25]), "+f"(s[26]), "+f"(s[27]), "+f"(s[28]), "+f"(s[29]), "+f"(s[30]), "+f"(s[31]), "+f"(s[32]), \
        "+f"(s[33]), "+f"(s[34]), "+f"(s[35]), "+f"(s[36]), "+f"(s[37]), "+f"(s[38]), "+f"(s[39]), "+f"(s[40]), \
        "+f"(s[41]), "+f"(s[42]), "+f"(s[43]), "+f"(s[44]), "+f"(s[45]), "+f"(s[46]), "+f"(s[47]), "+f"(s[48]), \
        "+f"(s[49]), "+f"(s[50]), "+f"(s[51]), "+f"(s[52]), "+f"(s[53]), "+f"(s[54]), "+f"(s[55]), "+f"(s[56]), \
        "+f"(s[57]), "+f"(s[58]), "+f"(s[59]), "+f"(s[60]), "+f"(s[61]), "+f"(s[62]), "+f"(s[63]), "+f"(s[64]), \
        "+f"(s[65]), "+f"(s[66]), "+f"(s[67]), "+f"(s[68]), "+f"(s[69]), "+f"(s[70]), "+f"(s[71]), "+f"(s[72]), \
        "+f"(s[73]), "+f"(s[74]), "+f"(s[75]), "+f"(s[76]), "+f"(s[77]), "+f"(s[78]), "+f"(s[79]), "+f"(s[80]), \
        "+f"(s[81]), "+f"(s[82]), "+f"(s[83]), "+f"(s[84]), "+f"(s[85]), "+f"(s[86]), "+f"(s[87]), "+f"(s[88]), \
        "+f"(s[89]), "+f"(s[90]), "+f"(s[91]), "+f"(s[92]), "+f"(s[93]), "+f"(s[94]), "+f"(s[95]), "+f"(s[96]), \
        "+f"(s[97]), "+f"(s[98]), "+f"(s[99]), "+f"(s[100]), "+f"(s[101]), "+f"(s[102]), "+f"(s[103]), "+f"(s[104]), \
        "+f"(s[105]), "+f"(s[106]), "+f"(s[107]), "+f"(s[108]), "+f"(s[109]), "+f"(s[110]), "+f"(s[111]), \
        "+f"(s[112]), "+f"(s[113]), "+f"(s[114]), "+f"(s[115]), "+f"(s[116]), "+f"(s[117]), "+f"(s[118]), \
        "+f"(s[119]), "+f"(s[120]), "+f"(s[121]), "+f"(s[122]), "+f"(s[123]), "+f"(s[124]), "+f"(s[125]), \
        "+f"(s[126]), "+f"(s[127]) \
      : "l"(a), "l"(b), "r"(adds))

// s = a [64, 16] bᵀ [256, 16], added to s if it `adds`; runs on by itself. Of warp w and lane l of the group, s[4 j + 2 h + i]
// is row 16 w + 8 h + l / 4, column 8 j + 2 (l % 4) + i.
__device__ __forceinline__ void multiply_group(float (&s)[kWgmmaSums], u64 a, u64 b, u32 adds) {
  if constexpr (kBf16) {
    WGMMA("bf16");
  } else {
    WGMMA("f16");
  }
}
#undef WGMMA
