// Codes to bit planes and back. Eight runs of codes (one byte per code) and eight planes are each other's
// transpose: bit p of byte j of run k is bit k of byte j of plane p. Three rounds of swaps transpose them. No
// bit changes its byte column, so the swaps work on whole words, and the same for 1 to 8 bits per element.
#pragma once

#include <cstdint>
#include <cstring>

#include "paths.h"

namespace mesa_tune::cpu {

using Word = uint64_t;
typedef Word Words __attribute__((vector_size(32)));

template <int distance, class V>
MESA_TUNE_INLINE void swap_round(V (&rows)[8], Word mask) {
  for (int low = 0; low < 8; ++low) {
    if (low & distance) continue;
    const V change = ((rows[low] >> distance) ^ rows[low + distance]) & (V{} + mask);
    rows[low + distance] ^= change;
    rows[low] ^= change << distance;
  }
}

template <class V>
MESA_TUNE_INLINE void transpose(V (&rows)[8]) {
  swap_round<4>(rows, 0x0F0F0F0F0F0F0F0F);
  swap_round<2>(rows, 0x3333333333333333);
  swap_round<1>(rows, 0x5555555555555555);
}

// Transposes `bytes` (at most sizeof(V)) columns of `rows_in` rows into `rows_out` rows. Missing input rows
// are 0.
template <class V>
MESA_TUNE_INLINE void transpose_columns(const uint8_t* in, int64_t in_stride, int64_t rows_in, uint8_t* out,
                                        int64_t out_stride, int64_t rows_out, int64_t bytes) {
  V rows[8] = {};
  for (int row = 0; row < 8; ++row) {
    if (row < rows_in) std::memcpy(&rows[row], in + row * in_stride, static_cast<size_t>(bytes));
  }
  transpose(rows);
  for (int row = 0; row < 8; ++row) {
    if (row < rows_out) std::memcpy(out + row * out_stride, &rows[row], static_cast<size_t>(bytes));
  }
}

// Transposes any number of columns.
MESA_TUNE_INLINE void transpose_rows(const uint8_t* in, int64_t in_stride, int64_t rows_in, uint8_t* out,
                                     int64_t out_stride, int64_t rows_out, int64_t columns) {
  constexpr int64_t wide = sizeof(Words), narrow = sizeof(Word);
  int64_t j = 0;
  for (; j + wide <= columns; j += wide)
    transpose_columns<Words>(in + j, in_stride, rows_in, out + j, out_stride, rows_out, wide);
  for (; j + narrow <= columns; j += narrow)
    transpose_columns<Word>(in + j, in_stride, rows_in, out + j, out_stride, rows_out, narrow);
  if (j < columns)
    transpose_columns<Word>(in + j, in_stride, rows_in, out + j, out_stride, rows_out, columns - j);
}

}  // namespace mesa_tune::cpu
