// qkv_append for __half and __nv_bfloat16, by the kernel of few_rows.cuh. Its tail applies RoPE to q and k, and writes
// keys and values into pages.
#include "cuda/linear/epilogue.cuh"
#include "cuda/linear/fused/sm80/append.hpp"
#include "cuda/linear/fused/sm80/few_rows.cuh"
#include "cuda/tile/rope.cuh"

namespace flashkernel::cuda::sm80 {
namespace {

/// A tile is 4 columns of a head and the 4 columns that RoPE turns with them, half a head further on.
template <class T>
struct AppendTail {
  T *q_out, *k_pages, *v_pages;
  std::int64_t stride_q_out_token, stride_q_out_head;
  std::int64_t num_pages, page_size;
  std::int64_t stride_k_page, stride_k_slot, stride_k_head, stride_v_page, stride_v_slot, stride_v_head;
  IndexArray slots, positions;
  RopeSpec rope;
  RopeTable table;
  bool has_rope;
  int heads_q, heads_kv, head_dim;
  RopeFrequencies frequencies;

  __device__ bool is_paired() const { return true; }
  __device__ int head(int tile) const { return tile / (head_dim / 8); }
  __device__ int first(int tile, int column) const { return tile % (head_dim / 8) * 4 + column; }
  /// A tile behind the last one is asked for, and not read.
  __device__ std::int64_t weight_row(int tile, int group) const {
    return head(tile) * head_dim + first(tile, group % 4) + (group < 4 ? 0 : head_dim / 2);
  }

  struct Rest {
    float bias, bias_of_second, cosine, sine;
    T* to;  // the head's first element; null: it goes nowhere
    __device__ void fetch(const FusedFewRowsArguments& p, const AppendTail& tail, int tile, int row, int column) {
      const int head = tail.head(tile), pair = tail.first(tile, column), half = tail.head_dim / 2;
      const int features = (tail.heads_q + 2 * tail.heads_kv) * tail.head_dim, feature = head * tail.head_dim + pair;
      bias = bias_of(p.bias, feature, features), bias_of_second = bias_of(p.bias, feature + half, features);
      cosine = 1.0f, sine = 0.0f;
      if (tail.has_rope && head < tail.heads_q + tail.heads_kv) tail.angle(row, pair, &cosine, &sine);
      to = tail.place(head, row);
    }
    __device__ void finish(const FusedFewRowsArguments&, const AppendTail& tail, int tile, int, int column, float x,
                           float y) const {
      if (!to) return;
      const int pair = tail.first(tile, column);
      x += bias, y += bias_of_second;
      to[pair] = from_float<T>(x * cosine - y * sine);
      to[pair + tail.head_dim / 2] = from_float<T>(x * sine + y * cosine);
    }
  };

  /// As kv_append's: a position outside the table, or that int32 does not hold,
  /// makes NaN.
  __device__ void angle(int row, int pair, float* cosine, float* sine) const {
    const std::int64_t position = positions[row];
    if (!table) return rope_angle(position, half_turns_per_token(rope, frequencies, pair), cosine, sine);
    *cosine = *sine = NAN;
    if (position < 0 || position >= table.rows) return;
    *cosine = load_typed(table.cos, table.dtype, position * table.stride_cos + pair);
    *sine = load_typed(table.sin, table.dtype, position * table.stride_sin + pair);
  }

  __device__ T* place(int head, int row) const {
    if (head < heads_q) return q_out + row * stride_q_out_token + head * stride_q_out_head;
    const std::int64_t slot = slots[row], page = slot / page_size, offset = slot - page * page_size;
    if (slot < 0 || page >= num_pages) return nullptr;
    head -= heads_q;
    if (head < heads_kv) return k_pages + page * stride_k_page + offset * stride_k_slot + head * stride_k_head;
    return v_pages + page * stride_v_page + offset * stride_v_slot + (head - heads_kv) * stride_v_head;
  }
};

template <class T>
void run(const QkvAppendParams& p, const FusedFewRowsPlan& plan, cudaStream_t stream) {
  const KvAppendParams& append = p.append;
  const KvPages& pages = append.pages;
  AppendTail<T> tail;
  tail.q_out = static_cast<T*>(p.q_out);
  tail.stride_q_out_token = p.stride_q_out_token, tail.stride_q_out_head = p.stride_q_out_head;
  tail.k_pages = static_cast<T*>(pages.k), tail.v_pages = static_cast<T*>(pages.v);
  tail.num_pages = pages.num_pages, tail.page_size = pages.page_size;
  tail.stride_k_page = pages.stride_k_page, tail.stride_k_slot = pages.stride_k_slot;
  tail.stride_k_head = pages.stride_k_head, tail.stride_v_page = pages.stride_v_page;
  tail.stride_v_slot = pages.stride_v_slot, tail.stride_v_head = pages.stride_v_head;
  tail.slots = append.slots, tail.positions = append.positions;
  tail.rope = append.rope, tail.table = append.table, tail.has_rope = append.has_rope;
  tail.heads_q = static_cast<int>(p.heads_q), tail.heads_kv = static_cast<int>(pages.heads_kv);
  tail.head_dim = static_cast<int>(pages.head_dim);
  if (append.has_rope && !append.table) tail.frequencies = rope_frequencies(append.rope);
  launch_fused_few_rows<T>("qkv_append: few rows", p.linear, plan, static_cast<int>(append_tiles(p)), tail, stream);
}

}  // namespace

void append_few_rows(const QkvAppendParams& p, const Plan& plan, void*, Stream stream) {
  if (p.linear.rows == 0) return;
  const CudaDeviceGuard guard(p.linear.device.index);
  if (p.linear.dtype == DType::kFloat16)
    run<__half>(p, plan.as<FusedFewRowsPlan>(), native(stream));
  else
    run<__nv_bfloat16>(p, plan.as<FusedFewRowsPlan>(), native(stream));
}

}  // namespace flashkernel::cuda::sm80
