// Tensor-core instructions of a warp: one function, one instruction. PTX ISA 9.7.14 (warp-level matrix instructions).
// Used by the kernels under cuda/sm75 (m16n8k8, ldmatrix) and cuda/sm80.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashkernel::cuda::ptx {

/// d += a b, fp32 accumulators. Lane l holds of A (16 x 16) rows l/4 and l/4 + 8, columns 2 (l%4) + {0, 1} and + 8; of
/// B (16 x 8) rows 2 (l%4) + {0, 1} and + 8, column l/4; of D (16 x 8) rows l/4 (d[0], d[1]) and l/4 + 8 (d[2], d[3]),
/// columns 2 (l%4) + {0, 1}.
template <class T>
__device__ inline void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);

template <>
__device__ inline void mma_m16n8k16<__half>(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                            std::uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                   std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// d = a b + c where both of a lane's rows of c are (c0, c1).
template <class T>
__device__ inline void mma_m16n8k16_from(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                                         float c0, float c1);

template <>
__device__ inline void mma_m16n8k16_from<__half>(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                 std::uint32_t b1, float c0, float c1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%10,%11};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1));
}

template <>
__device__ inline void mma_m16n8k16_from<__nv_bfloat16>(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                        std::uint32_t b1, float c0, float c1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%10,%11};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1));
}

/// d += a b in fp16 with fp32 accumulators, sm_75 and later. Lane l holds of A (16 x 8) rows l/4 (a0) and l/4 + 8 (a1),
/// columns 2 (l%4) + {0, 1}; of B (8 x 8) rows 2 (l%4) + {0, 1}, column l/4; D as above. So two of these, (a[0], a[1],
/// b0) and (a[2], a[3], b1), are one m16n8k16.
__device__ inline void mma_m16n8k8(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}

/// d += a b of fp32 values, of which the tensor core reads the upper 19 bits (TF32). Lane l holds of A (16 x 8) rows
/// l/4 and l/4 + 8 of column l%4 (a[0], a[1]) and of column l%4 + 4 (a[2], a[3]); of B (8 x 8) column l/4 of rows l%4
/// and l%4 + 4; D as above.
__device__ inline void mma_m16n8k8_tf32(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                        std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l%8 of matrix l/8 and gets of each matrix
/// row l/4, columns 2 (l%4) + {0, 1}.
__device__ inline void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address));
}

/// The same, each matrix transposed.
__device__ inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address));
}

/// An 8 x 8 matrix of 16-bit elements, transposed: lane l gives row l/4, columns 2 (l%4) + {0, 1}, and gets the same
/// place of the transpose.
__device__ inline std::uint32_t movmatrix_trans(std::uint32_t a) {
  std::uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

}  // namespace flashkernel::cuda::ptx
