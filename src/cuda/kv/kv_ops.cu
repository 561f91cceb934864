// KV append without RoPE (with it: kv_append_rope.cu, kv_append_norm.cu; into 8-bit pages: kv_quantized.cu), gather and
// page copy. Bound by memory: rows move in units of 16 bytes where everything is aligned for it (else of one element),
// a warp a row, four units a lane in flight; heads that lie side by side at both ends make one row. All page arithmetic
// is 64-bit. A slot or page id out of range moves nothing: these kernels stay in bounds whatever the table holds.
#include "cuda/kv/kv.hpp"
#include "cuda/kv/lengths_after.cuh"
#include "cuda/host/launch.hpp"
#include "cuda/tile/reduce.cuh"
#include "cuda/pipeline/turn.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // units a lane loads before it stores the first

/// One of the two tensors: rows of `units` units, heads `heads` a token; every stride in units.
struct RowLayout {
  std::int64_t units = 0, heads = 1;
  std::int64_t stride_page = 0, stride_slot = 0, stride_page_head = 0;  // in the pages
  std::int64_t stride_batch = 0, stride_token = 0, stride_head = 0;     // at the other end

  __device__ std::int64_t in_pages(std::int64_t page, std::int64_t slot, std::int64_t head) const {
    return page * stride_page + slot * stride_slot + head * stride_page_head;
  }
};

/// The layouts of k and v, in this order.
struct Layouts {
  RowLayout of[2];
};

template <class Unit, int kLanes>
__device__ inline void copy_row(Unit* __restrict__ to, const Unit* __restrict__ from, std::int64_t units, int lane) {
  for (std::int64_t base = lane; base < units; base += kLanes * kInFlight) {
    Unit held[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (base + i * kLanes < units) held[i] = from[base + i * kLanes];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (base + i * kLanes < units) to[base + i * kLanes] = held[i];
  }
}

template <class Unit, int kLanes>
__device__ inline void zero_row(Unit* to, std::int64_t units, int lane) {
  for (std::int64_t i = lane; i < units; i += kLanes) to[i] = Unit{};
}

/// The row of this group of kLanes threads; rows are numbered over x.
template <int kLanes>
__device__ inline std::int64_t my_row() {
  return static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
}

/// Grid: (rows of tokens x heads, k or v).
template <class Unit, int kLanes>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ KvAppendParams p, const __grid_constant__ Layouts layouts) {
  take_turn();
  write_lengths_after(p);
  const bool is_v = blockIdx.y == 1;
  const RowLayout& layout = layouts.of[blockIdx.y];
  const std::int64_t row = my_row<kLanes>();
  if (row >= p.tokens * layout.heads) return;
  const std::int64_t token = layout.heads == 1 ? row : row / layout.heads, head = row - token * layout.heads;
  const std::int64_t slot = p.slot(token), page = slot / p.pages.page_size;
  if (slot < 0 || page >= p.pages.num_pages) return;
  copy_row<Unit, kLanes>(
      static_cast<Unit*>(is_v ? p.pages.v : p.pages.k) + layout.in_pages(page, slot - page * p.pages.page_size, head),
      static_cast<const Unit*>(is_v ? p.v : p.k) + token * layout.stride_token + head * layout.stride_head,
      layout.units, threadIdx.x % kLanes);
}

template <class Unit, int kLanes>
__global__ void __launch_bounds__(kThreads)
    read_kernel(const __grid_constant__ KvReadParams p, const __grid_constant__ Layouts layouts) {
  const bool is_v = blockIdx.y == 1;
  const RowLayout& layout = layouts.of[blockIdx.y];
  const std::int64_t row = my_row<kLanes>();
  if (row >= p.batch * p.max_seq * layout.heads) return;
  const std::int64_t at = layout.heads == 1 ? row : row / layout.heads, head = row - at * layout.heads;
  const std::int64_t b = at / p.max_seq, position = at - b * p.max_seq;
  const std::int64_t block = position / p.pages.page_size;
  const bool in_table = block < p.max_pages;
  const std::int64_t entry = in_table ? p.block_table[b * p.stride_block_table + block] : -1;
  const std::int64_t page = position < p.seq_lens[b] ? entry : -1;
  Unit* to = static_cast<Unit*>(is_v ? p.v_out : p.k_out) + b * layout.stride_batch + position * layout.stride_token +
             head * layout.stride_head;
  const int lane = threadIdx.x % kLanes;
  if (page < 0 || page >= p.pages.num_pages) return zero_row<Unit, kLanes>(to, layout.units, lane);
  copy_row<Unit, kLanes>(to,
                         static_cast<const Unit*>(is_v ? p.pages.v : p.pages.k) +
                             layout.in_pages(page, position - block * p.pages.page_size, head),
                         layout.units, lane);
}

template <class Unit, int kLanes>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const __grid_constant__ KvCopyParams p, const __grid_constant__ Layouts layouts) {
  const bool is_v = blockIdx.y == 1;
  const RowLayout& layout = layouts.of[blockIdx.y];
  const std::int64_t row = my_row<kLanes>();
  if (row >= p.count * p.pages.page_size * layout.heads) return;
  const std::int64_t at = layout.heads == 1 ? row : row / layout.heads, head = row - at * layout.heads;
  const std::int64_t i = at / p.pages.page_size, slot = at - i * p.pages.page_size;
  const std::int64_t from = p.src[i], to = p.dst[i];
  if (from < 0 || to < 0 || from >= p.pages.num_pages || to >= p.pages.num_pages) return;
  Unit* pages = static_cast<Unit*>(is_v ? p.pages.v : p.pages.k);
  copy_row<Unit, kLanes>(pages + layout.in_pages(to, slot, head), pages + layout.in_pages(from, slot, head),
                         layout.units, threadIdx.x % kLanes);
}

// ---- The host's part: units, merged heads, launch.

/// Strides and sizes in elements, and what must be aligned.
struct Rows {
  const void *pages, *other;
  RowLayout layout;
};

Rows k_rows(const KvPages& pages, const void* other, std::int64_t stride_batch, std::int64_t stride_token,
            std::int64_t stride_head) {
  return {pages.k,
          other,
          {pages.head_dim, pages.heads_kv, pages.stride_k_page, pages.stride_k_slot, pages.stride_k_head, stride_batch,
           stride_token, stride_head}};
}

Rows v_rows(const KvPages& pages, const void* other, std::int64_t stride_batch, std::int64_t stride_token,
            std::int64_t stride_head) {
  return {pages.v,
          other,
          {pages.head_dim_v, pages.heads_kv, pages.stride_v_page, pages.stride_v_slot, pages.stride_v_head,
           stride_batch, stride_token, stride_head}};
}

/// The other end are pages too.
Rows between_pages(Rows rows) {
  rows.other = rows.pages;
  rows.layout.stride_head = rows.layout.stride_page_head;
  return rows;
}

void merge_heads(RowLayout& layout) {
  if (layout.heads == 1) layout.stride_page_head = layout.stride_head = layout.units;  // never used
  if (layout.stride_page_head != layout.units || layout.stride_head != layout.units) return;
  layout.units *= layout.heads;
  layout.heads = 1;
}

bool in_units_of(std::int64_t elements, std::size_t bytes, const Rows& rows) {
  const RowLayout& l = rows.layout;
  for (const std::int64_t stride :
       {l.units, l.stride_page, l.stride_slot, l.stride_page_head, l.stride_batch, l.stride_token, l.stride_head})
    if (stride % elements != 0) return false;
  return is_aligned(rows.pages, bytes) && is_aligned(rows.other, bytes);
}

void count_in_units(std::int64_t elements, RowLayout& l) {
  for (std::int64_t* stride : {&l.units, &l.stride_page, &l.stride_slot, &l.stride_page_head, &l.stride_batch,
                               &l.stride_token, &l.stride_head})
    *stride /= elements;
}

/// f(Unit{}, Lanes<n>{}, k, v): the largest unit, and a quarter of a warp for rows that a quarter moves in one go.
template <int kValue>
struct Lanes {
  static constexpr int value = kValue;
};
template <class F>
void with_units(DType dtype, Rows k, Rows v, F f) {
  merge_heads(k.layout);
  merge_heads(v.layout);
  const auto with_lanes = [&](auto unit) {
    if (std::max(k.layout.units, v.layout.units) <= 8 * kInFlight) return f(unit, Lanes<8>{}, k.layout, v.layout);
    f(unit, Lanes<32>{}, k.layout, v.layout);
  };
  const auto element = static_cast<std::int64_t>(dtype_bytes(dtype));
  if (in_units_of(16 / element, 16, k) && in_units_of(16 / element, 16, v)) {
    count_in_units(16 / element, k.layout);
    count_in_units(16 / element, v.layout);
    return with_lanes(uint4{});
  }
  if (element == 1) return with_lanes(std::uint8_t{});
  if (element == 4) return with_lanes(std::uint32_t{});
  with_lanes(std::uint16_t{});
}

template <int kLanes>
LaunchShape shape_for(std::int64_t rows, cudaStream_t stream) {
  return {dim3(static_cast<unsigned>(ceil_div(rows, kThreads / kLanes)), 2), kThreads, 0, stream};
}

}  // namespace

Verdict kv_append_supports(const KvAppendParams& p) {
  if (p.has_norm() && p.pages.head_dim > kMostNormedDim) return "norms heads of up to 512 elements";
  return p.pages.quantization ? kv_append_quantized_supports(p) : Verdict::ok();
}
void kv_append(const KvAppendParams& p, void*, Stream stream) {
  if (p.tokens == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  if (p.pages.quantization) return kv_append_quantized(p, stream);
  if (p.has_norm()) return kv_append_norm(p, stream);
  if (p.has_rope) return kv_append_rope(p, stream);
  with_units(p.dtype, k_rows(p.pages, p.k, 0, p.stride_k_token, p.stride_k_head),
             v_rows(p.pages, p.v, 0, p.stride_v_token, p.stride_v_head),
             [&](auto unit, auto lanes, const RowLayout& k, const RowLayout& v) {
               constexpr int kLanes = decltype(lanes)::value;
               LaunchShape shape = shape_for<kLanes>(p.tokens * std::max(k.heads, v.heads), native(stream));
               shape.early = true;
               launch("kv_append", append_kernel<decltype(unit), kLanes>, shape, p, Layouts{{k, v}});
             });
}

Verdict kv_read_supports(const KvReadParams&) { return Verdict::ok(); }
void kv_read(const KvReadParams& p, void*, Stream stream) {
  if (p.batch * p.max_seq * p.pages.heads_kv == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  if (p.pages.quantization) return kv_read_quantized(p, stream);
  with_units(p.dtype, k_rows(p.pages, p.k_out, p.stride_k_out_batch, p.stride_k_out_token, p.stride_k_out_head),
             v_rows(p.pages, p.v_out, p.stride_v_out_batch, p.stride_v_out_token, p.stride_v_out_head),
             [&](auto unit, auto lanes, const RowLayout& k, const RowLayout& v) {
               constexpr int kLanes = decltype(lanes)::value;
               launch("kv_read", read_kernel<decltype(unit), kLanes>,
                      shape_for<kLanes>(p.batch * p.max_seq * std::max(k.heads, v.heads), native(stream)), p,
                      Layouts{{k, v}});
             });
}

namespace {

/// Scales [num_pages, heads_kv, page_size] as pages of one token whose heads are rows of scales; those of groups as
/// pages of as many tokens.
void copy_scales(const KvCopyParams& p, Stream stream) {
  KvCopyParams scales = p;
  const KvQuantization& quantization = p.pages.quantization;
  scales.dtype = DType::kFloat32;
  scales.pages.quantization = {};
  scales.pages.k = quantization.k.data;
  scales.pages.v = quantization.v.data;
  scales.pages.stride_k_page = quantization.k.stride_page;
  scales.pages.stride_v_page = quantization.v.stride_page;
  scales.pages.stride_k_head = quantization.k.stride_head;
  scales.pages.stride_v_head = quantization.v.stride_head;
  if (quantization.packed) {
    if (p.pages.dtype == DType::kFloat4E2M1x2) scales.dtype = DType::kUInt8;
    scales.pages.head_dim = quantization.k.groups;
    scales.pages.head_dim_v = quantization.v.groups;
    scales.pages.stride_k_slot = quantization.k.stride_slot;
    scales.pages.stride_v_slot = quantization.v.stride_slot;
  } else {
    scales.pages.page_size = 1;
    scales.pages.head_dim = scales.pages.head_dim_v = p.pages.page_size;
    scales.pages.stride_k_slot = scales.pages.stride_v_slot = 0;
  }
  kv_copy(scales, nullptr, stream);
}

}  // namespace

Verdict kv_copy_supports(const KvCopyParams&) { return Verdict::ok(); }
void kv_copy(const KvCopyParams& p, void*, Stream stream) {
  if (p.count * p.pages.page_size * p.pages.heads_kv == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  if (p.pages.quantization.per_token) copy_scales(p, stream);
  with_units(p.dtype, between_pages(k_rows(p.pages, nullptr, 0, 0, 0)),
             between_pages(v_rows(p.pages, nullptr, 0, 0, 0)),
             [&](auto unit, auto lanes, const RowLayout& k, const RowLayout& v) {
               constexpr int kLanes = decltype(lanes)::value;
               launch("kv_copy_pages", copy_kernel<decltype(unit), kLanes>,
                      shape_for<kLanes>(p.count * p.pages.page_size * std::max(k.heads, v.heads), native(stream)), p,
                      Layouts{{k, v}});
             });
}

}  // namespace flashkernel::cuda
