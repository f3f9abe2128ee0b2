// Integer names used by all device code. No toolkit header is included anywhere: users have none.
#pragma once
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// No literal is infinite; one too large is rounded there with a warning.
#define kInfinity __int_as_float(0x7f800000)

// Bytes from a structure's start to a field. NVRTC has no offsetof of its own, but what it is made of.
#ifdef __CUDACC_RTC__
#define OFFSET_OF(type, field) __INTADDR__(&static_cast<type*>(nullptr)->field)
#else
#define OFFSET_OF(type, field) __builtin_offsetof(type, field)
#endif
