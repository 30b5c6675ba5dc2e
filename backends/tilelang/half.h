// The 16-bit types of TileLang's C target, instead of its own (whose header takes seconds to parse).
// The target prints float16 only, as `half`; host_c.py makes `half` one of these two classes.
// Stores round to nearest, ties to even; arithmetic happens in float. Branch-free, to vectorise.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of(float value) {
  uint32_t u;
  memcpy(&u, &value, sizeof u);
  return u;
}

static inline float float_of(uint32_t u) {
  float value;
  memcpy(&value, &u, sizeof value);
  return value;
}

struct lycoris_bf16 {
  uint16_t bits;
  lycoris_bf16() = default;
  lycoris_bf16(float value) {
    const uint32_t u = bits_of(value);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    // A NaN stays one: rounding could carry its payload into the exponent and the sign.
    bits = (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40 : rounded;
  }
  operator float() const { return float_of((uint32_t)bits << 16); }
};

struct lycoris_fp16 {
  uint16_t bits;
  lycoris_fp16() = default;
  lycoris_fp16(float value) {
    const uint32_t u = bits_of(value), magnitude = u & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
    // The unit of 0.5f is fp16's smallest subnormal, so that the addition itself rounds.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half_bits = magnitude < 0x38800000u ? subnormal : normal;
    half_bits = magnitude >= 0x477ff000u ? 0x7c00u : half_bits;  // from 65520 on: infinity
    half_bits = magnitude > 0x7f800000u ? 0x7e00u : half_bits;   // NaN
    bits = half_bits | ((u >> 16) & 0x8000u);
  }
  operator float() const {
    const float scaled = float_of((bits & 0x7fffu) << 13) * 0x1p112f;  // exact, subnormals too
    const uint32_t special = scaled >= 65536.0f ? 0x7f800000u : 0u;    // infinity and NaN
    return float_of(bits_of(scaled) | special | (bits & 0x8000u) << 16);
  }
};
