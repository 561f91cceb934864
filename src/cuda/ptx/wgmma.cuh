// The warpgroup matrix instructions of sm_90a: one function, one instruction. PTX ISA 9.7.15 (asynchronous warpgroup
// level matrix multiply). Used by the kernels under cuda/sm90a; all of them need compute_90a.
//
// Fragments, for thread t of the warpgroup (warp w = t / 32, lane l = t % 32):
//   D (64 x kN, fp32): row 16 w + l / 4 + 8 h, column 8 c + 2 (l % 4) + e lies in d[4 c + 2 h + e], h and e in {0, 1}.
//   A in registers (64 x 16, 16 bit): row 16 w + l / 4 + 8 (r % 2), columns 8 (r / 2) + 2 (l % 4) + {0, 1} in a[r].
// So columns 16 k .. 16 k + 15 of a D, rounded and packed in pairs, are d[8 k ..] -> a[0..3]: (0, 1), (2, 3), (4, 5),
// (6, 7).
//   A of 8-bit numbers in registers (64 x 32): row 16 w + l / 4 + 8 (r % 2), columns 16 (r / 2) + 4 (l % 4) + {0 .. 3}
//   in a[r], the first in the low byte. A D's two neighbours a lane are not A's four: who makes an A of a D must either
//   exchange registers among the four lanes of a row or bring B's k in the order that D has.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashkernel::cuda::ptx {

/// How the rows of a tile lie in shared memory: 128-byte lines whose 16-byte chunks are xored with the line's number
/// in its group of 8 lines (address bits 4..6 ^= bits 7..9), and so on for 64 and 32 bytes.
enum class Swizzle : std::uint64_t { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

/// A matrix operand in shared memory: bits 0..13 address / 16, 16..29 leading byte offset / 16, 32..45 stride byte
/// offset / 16, 62..63 the swizzle. Tiles of the 128-byte swizzle begin at multiples of 1024 bytes; moving the
/// operand by n bytes within them adds n / 16.
///   K-major (rows of A or of n-major B hold 64 consecutive k): stride = 1024 from 8 rows to the next 8; leading
///   unused; 16 further k are + 32 bytes.
///     Of 8-bit numbers a line holds 128 consecutive k, and 32 further k are + 32 bytes; they know no other order.
///   MN-major (kTransA, kTransB: a line holds 64 consecutive m or n of one k): stride = 1024 from 8 k to the next 8;
///   leading = bytes from 64 columns to the next 64; 16 further k are + 2048 bytes.
__device__ inline std::uint64_t matrix_descriptor(std::uint32_t shared_address, std::uint32_t leading_bytes,
                                                  std::uint32_t stride_bytes, Swizzle swizzle = Swizzle::k128) {
  return static_cast<std::uint64_t>((shared_address & 0x3ffff) >> 4) |
         static_cast<std::uint64_t>(leading_bytes >> 4) << 16 | static_cast<std::uint64_t>(stride_bytes >> 4) << 32 |
         static_cast<std::uint64_t>(swizzle) << 62;
}

/// Orders this warp's register and shared-memory writes before the wgmma that follow. The first of a batch, and each
/// one whose accumulators were touched by other instructions, needs it.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Closes a batch of wgmma.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Returns when at most kPending batches are under way.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// No instruction: keeps the compiler from moving reads or writes of a register across this point. wgmma works on
/// its accumulators in the background, which the compiler can't see.
__device__ inline void hold(float& value) { asm volatile("" : "+f"(value)::"memory"); }
__device__ inline void hold(std::uint32_t& value) { asm volatile("" : "+r"(value)::"memory"); }
__device__ inline void hold(float*& value) { asm volatile("" : "+l"(value)::"memory"); }
template <class V, int kCount>
__device__ inline void hold(V (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) hold(values[i]);
}

/// Elements of 8 bits: OCP E4M3FN (largest 448) and E5M2 (largest 57344, with infinities).
struct E4m3;
struct E5m2;

/// What the instruction calls T.
template <class T>
struct WgmmaType;
template <>
struct WgmmaType<__half> {
  static constexpr const char kName[] = "f16";
};
template <>
struct WgmmaType<__nv_bfloat16> {
  static constexpr const char kName[] = "bf16";
};
template <>
struct WgmmaType<E4m3> {
  static constexpr const char kName[] = "e4m3";
};
template <>
struct WgmmaType<E5m2> {
  static constexpr const char kName[] = "e5m2";
};

// wgmma_ss<T, kTransA, kTransB>(d, a, b, accumulate): D = A B (+ D), 64 x kN x 16, both operands in shared memory by
// descriptor. wgmma_rs<T, kTransB>(d, a, b, accumulate): A in registers. kN is twice the length of d; kTrans* says
// that an operand lies MN-major. With `accumulate` false D is written without being read.
//
// wgmma_fp8_ss<A, B>(d, a, b, accumulate), wgmma_fp8_rs: the same of 8-bit numbers, 64 x kN x 32, both operands
// K-major; A and B are E4m3 or E5m2. Hopper adds their products in D with about 14 bits of mantissa, not with fp32's
// 24: sums over a long k are to be carried on in registers of one's own every 128 of k or so (DeepGEMM's measure).
#include "cuda/ptx/wgmma_forms.inc"

}  // namespace flashkernel::cuda::ptx
