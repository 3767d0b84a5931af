// Rounds values of one group to codes, and decodes codes to values.
#pragma once

#include "arithmetic.h"

namespace mesa_tune::cpu {

// Rounds values of one group to codes.
class Encoder {
 public:
  Encoder(const Range& range, int64_t levels, bool stochastic, const Keys& keys)
      : stochastic_(stochastic), keys_(keys), scale_(range, levels) {}

  // Encodes elements [element, element + n) of the group; `values` are quartered if the range is wide.
  MESA_TUNE_INLINE void encode(const float* values, int64_t n, int64_t element, uint8_t* codes) const {
    if (!stochastic_) return encode_nearest(values, n, codes);
    while (n > 0) {
      const bool whole = element % kNoiseBlock == 0 && n >= 2 * kHalf;
      const int64_t count = whole ? 2 * kHalf : std::min(n, kHalf - element % kHalf);
      const uint32_t counter = counter_of(element, keys_);
      if (whole) {
        encode_pairs(values, values + kHalf, counter, codes, codes + kHalf);
      } else {
        encode_half(values, count, counter, takes_upper_noise(element) ? 16 : 0, codes);
      }
      values += count, codes += count, element += count, n -= count;
    }
  }

 private:
  static constexpr int64_t kHalf = kNoiseBlock / 2;

  // The code of a value: its position in units of 2^-16 plus 16 bits of noise, without the lower 16 bits.
  MESA_TUNE_INLINE uint8_t code(float value, uint32_t noise) const {
    const auto position = static_cast<int32_t>(scale_.position(value) * 0x1p16f + 0.5f);
    return static_cast<uint8_t>((position + static_cast<int32_t>(noise & 0xFFFF)) >> 16);
  }
  MESA_TUNE_INLINE void encode_pairs(const float* __restrict first, const float* __restrict second,
                                     uint32_t counter, uint8_t* __restrict first_codes,
                                     uint8_t* __restrict second_codes) const {
    for (int64_t i = 0; i < kHalf;
         ++i, ++counter) {  // a 32-bit counter, so that vectors have 32-bit elements
      const uint32_t pair_noise = noise(counter, keys_.hash_key);
      first_codes[i] = code(first[i], pair_noise);
      second_codes[i] = code(second[i], pair_noise >> 16);
    }
  }
  MESA_TUNE_INLINE void encode_half(const float* __restrict values, int64_t n, uint32_t counter, int shift,
                                    uint8_t* __restrict codes) const {
    for (int64_t i = 0; i < n; ++i, ++counter)
      codes[i] = code(values[i], noise(counter, keys_.hash_key) >> shift);
  }
  MESA_TUNE_INLINE void encode_nearest(const float* __restrict values, int64_t n,
                                       uint8_t* __restrict codes) const {
    for (int64_t i = 0; i < n; ++i) {
      const float position = scale_.position(values[i]);
      const int32_t whole = static_cast<int32_t>(position);
      codes[i] = static_cast<uint8_t>(whole + (position - static_cast<float>(whole) > 0.5f));
    }
  }

  bool stochastic_;
  Keys keys_;
  Scale scale_;
};

// Decodes a group whose range is wide or invalid.
inline void decode_slowly(const Range& stored, int64_t levels, const uint8_t* codes, int64_t n,
                          float* values) {
  const Range range = stored.revealed();
  const float factor = range.wide() ? kQuarter : 1.0f;
  const float base = range.zero * factor, step = range.wide() ? -range.step : range.step;
  const float most = std::numeric_limits<float>::max() * factor;
  const int64_t gap = stored.has_gaps() ? levels - 1 : levels;
  for (int64_t i = 0; i < n; ++i)
    values[i] = codes[i] == gap ? bit_cast<float>(kNan)
                                : std::min(base + static_cast<float>(codes[i]) * step, most) / factor;
}

MESA_TUNE_INLINE void decode(const Range& range, int64_t levels, const uint8_t* __restrict codes, int64_t n,
                             float* __restrict values) {
  if (!range.plain()) return decode_slowly(range, levels, codes, n, values);
  const float zero = range.zero, step = range.step;
  for (int64_t i = 0; i < n; ++i) values[i] = zero + static_cast<float>(codes[i]) * step;
}

}  // namespace mesa_tune::cpu
