// bfloat16 for TileLang's C target, force-included by host_c.py.
// The target can print float16 only, as `half`; a kernel that holds bfloat16 is built as if it held
// float16, with `half` being this class. Conversions from float round to nearest, ties to even.
#pragma once
#include <stdint.h>
#include <string.h>
#include <tl_templates/cpp/common.h>

struct lycoris_bf16 {
  uint16_t bits;
  lycoris_bf16() = default;
  lycoris_bf16(float value) {
    uint32_t u;
    memcpy(&u, &value, sizeof u);
    const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    // A NaN keeps its sign and stays quiet: rounding could carry its payload into the exponent.
    bits = nan ? (u >> 16) | 0x40 : (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  }
  operator float() const {
    const uint32_t u = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &u, sizeof value);
    return value;
  }
};
#define half lycoris_bf16
