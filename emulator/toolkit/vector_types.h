// CUDA's vector types with their alignment, as in the CUDA C++ programming guide. Part of the emulator's
// cuda_runtime.h.
#pragma once

#define SIMT_VECTOR_TYPES(type, name, one)                                              \
  struct alignas(one) name##1 {                                                         \
    type x;                                                                             \
  };                                                                                    \
  struct alignas(2 * one) name##2 {                                                     \
    type x, y;                                                                          \
  };                                                                                    \
  struct name##3 {                                                                      \
    type x, y, z;                                                                       \
  };                                                                                    \
  struct alignas(4 * one > 16 ? 16 : 4 * one) name##4 {                                 \
    type x, y, z, w;                                                                    \
  };                                                                                    \
  inline constexpr name##1 make_##name##1(type x) { return {x}; }                       \
  inline constexpr name##2 make_##name##2(type x, type y) { return {x, y}; }            \
  inline constexpr name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  inline constexpr name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

SIMT_VECTOR_TYPES(signed char, char, 1)
SIMT_VECTOR_TYPES(unsigned char, uchar, 1)
SIMT_VECTOR_TYPES(short, short, 2)
SIMT_VECTOR_TYPES(unsigned short, ushort, 2)
SIMT_VECTOR_TYPES(int, int, 4)
SIMT_VECTOR_TYPES(unsigned, uint, 4)
SIMT_VECTOR_TYPES(long long, longlong, 8)
SIMT_VECTOR_TYPES(unsigned long long, ulonglong, 8)
SIMT_VECTOR_TYPES(float, float, 4)
SIMT_VECTOR_TYPES(double, double, 8)
#undef SIMT_VECTOR_TYPES

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
