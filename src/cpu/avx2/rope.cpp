// RoPE and kv_append with AVX2; the loops are in simd/rope_impl.hpp.
#include "cpu/fast_ops.hpp"
#include "cpu/simd/rope_impl.hpp"

namespace flashkernel::cpu::avx2 {

void rope(const RopeParams& p, void*, Stream) {
  visit_type(p.dtype, [&](auto type) { rope_typed<decltype(type)>(p); });
}

void kv_append(const KvAppendParams& p, void*, Stream) {
  visit_type(p.dtype, [&](auto type) { kv_append_typed<decltype(type)>(p); });
}

}  // namespace flashkernel::cpu::avx2
