// What the kernels of attention_mla_decode get. Filled by ops/attention_mla.cpp.
#pragma once

#include "ops/attention_params.hpp"
#include "ops/latent_format.hpp"

namespace flashkernel {

/// The call as paged attention of one kv head whose values are the first head_dim_v columns of its keys: k and v point
/// to the same rows, with the same strides. There are no modifiers, no window and no variable lengths of queries. Rows
/// of 8 bits (`format`): attention.dtype is float8_e4m3fn, and strides of k and v count bytes.
struct MlaDecodeParams {
  static constexpr const char* kOp = "attention_mla_decode";

  AttentionParams attention;
  LatentFormat format;
};

/// What a call has to do (params_common.hpp).
inline double work_of(const MlaDecodeParams& p) { return work_of(p.attention); }

/// Rows of latents on their way into 8-bit pages.
struct LatentAppendParams {
  static constexpr const char* kOp = "latent_append";

  DType dtype = DType::kFloat32;  // of latent and key
  Device device{};
  std::int64_t tokens = 0, turned = 0;  // turned: columns of the key
  const void* latent = nullptr;         // [tokens, format.rank], last dim contiguous
  const void* key = nullptr;            // [tokens, turned], last dim contiguous
  std::int64_t stride_latent = 0, stride_key = 0;
  std::uint8_t* pages = nullptr;  // [num_pages, page_size] rows, strides in bytes
  std::int64_t num_pages = 0, page_size = 0, stride_page = 0, stride_slot = 0;
  IndexArray slots;  // [tokens]
  LatentFormat format;
};

/// What a call has to do (params_common.hpp).
inline double work_of(const LatentAppendParams& p) { return work::product(p.tokens, p.format.columns); }

}  // namespace flashkernel
