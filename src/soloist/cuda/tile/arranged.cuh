// The order of activations' columns that products with packed matrices read: `arranged_column` of prefill/fragments.py.
#pragma once
#include "ptx/types.cuh"

// Of a row's places of 16 bytes: the first column of the four words that one has. The other words' are 8, 16 and 24 further on.
__device__ __forceinline__ u32 first_arranged_column(u32 place) { return place / 4 * 32 + place % 4 * 2; }
