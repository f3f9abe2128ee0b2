// The order of activations' columns that products with packed matrices read: `arranged_column` of prefill/fragments.py.
#pragma once
#include "ptx/types.cuh"

// Of a row's places of 16 bytes: the first column of the four words that one has. The other words' are 8, 16 and 24 further on.
__device__ __forceinline__ u32 first_arranged_column(u32 place) { return place / 4 * 32 + place % 4 * 2; }
// Of a row's words of two columns: the place of one. Where `word` is even the next word's place is four further on.
__device__ __forceinline__ u32 arranged_word(u32 word) { return word / 16 * 16 + word % 4 * 4 + word % 16 / 4; }
