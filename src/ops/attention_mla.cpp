// Front doors of attention_mla_decode, which describes the call as paged attention of one kv head, and latent_append.
// Called by users and by the bindings. Invariant: an error leaves out, lse and pages untouched.
#include "flashkernel/attention_mla.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/attention_check.hpp"
#include "ops/attention_mla_params.hpp"
#include "ops/page_table.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

// DeepSeek's: 512 columns of the latent, and 64 of the rotated key beside them.
constexpr std::int64_t kMaxLatentDim = 576, kMaxLatentValueDim = 512;

void check_operand(const Checker& check, const char* name, const TensorView& view, const TensorView& q, int ndim) {
  check.floating(name, view);
  if (view.dtype != q.dtype)
    check.fail(std::string(name) + " is " + dtype_name(view.dtype) + " but q is " + dtype_name(q.dtype) +
               "; dtypes must match");
  check.ndim(name, view, ndim, ndim);
  check.last_dim_contiguous(name, view);
}

void check_range(const Checker& check, const char* name, const TensorView& view, int d, std::int64_t most,
                 const char* what) {
  if (view.shape[d] < 1 || view.shape[d] > most)
    check.fail(shape_text(name, view, d) + "; " + what + " must be 1 to " + std::to_string(most));
}

bool is_byte(DType dtype) { return dtype == DType::kUInt8 || dtype == DType::kFloat8E4M3; }

/// One number on the host is read here; what lies on the op's device is left to the kernel.
LatentScale check_latent_scale(const Checker& check, const TensorView& scale) {
  if (!scale.defined()) return {};
  if (scale.numel() != 1 || scale.ndim > 1)
    check.fail("latent_scale is " + to_string(scale) + "; needs one float32 number");
  if (!scale.device.is_cpu()) {
    check.dtype("latent_scale", scale, DType::kFloat32);
    return {1.0f, static_cast<const float*>(scale.data)};
  }
  Checker(check.op().c_str(), scale.device).dtype("latent_scale", scale, DType::kFloat32);
  return {*static_cast<const float*>(scale.data), nullptr};
}

/// The form of pages of bytes whose rows have `rank` latent columns of `columns`.
LatentFormat check_narrow(const Checker& check, const TensorView& latent, const TensorView& scale, std::int64_t rank,
                          std::int64_t columns) {
  check.tensor("latent_pages", latent);
  check.ndim("latent_pages", latent, 3, 3);
  check.last_dim_contiguous("latent_pages", latent);
  LatentFormat format;
  format.rank = rank, format.columns = columns;
  const std::int64_t bytes = LatentFormat::bytes(rank, columns - rank);
  if (latent.shape[2] == columns) {  // a row with its own scales is longer
    format.kind = LatentKind::kOneScale;
    format.scale = check_latent_scale(check, scale);
    return format;
  }
  format.kind = LatentKind::kGroups;
  if (latent.shape[2] != bytes)
    check.fail(shape_text("latent_pages", latent, 2) + "; needs " + std::to_string(bytes) + " bytes for " +
               std::to_string(rank) + " latent columns, their scales and " + std::to_string(columns - rank) +
               " in bfloat16, or " + std::to_string(columns) + " of float8_e4m3fn");
  if (scale.defined()) check.fail("latent_scale is given, but the rows of latent_pages hold their own scales");
  if (rank % 4 != 0 || reinterpret_cast<std::uintptr_t>(latent.data) % 4 != 0 || latent.strides[0] % 4 != 0 ||
      latent.strides[1] % 4 != 0)
    check.fail("latent_pages is " + to_string(latent) + " with " + std::to_string(rank) +
               " latent columns; rows of 8 bits and their scales must start at multiples of 4 bytes");
  return format;
}

void check_pages_there(const Checker& check, const TensorView& latent) {
  if (latent.shape[1] < 1) check.fail(shape_text("latent_pages", latent, 1) + "; a page holds at least one token");
}

void check_results(const Checker& check, const TensorView& q, const TensorView& latent, const TensorView& block_table,
                   const TensorView& seq_lens, const TensorView& out, const TensorView& lse) {
  check_operand(check, "out", out, q, 4);
  for (int d = 0; d < 3; ++d) check.extent("out", out, d, q.shape[d], "q's shape but for its last dim");
  check_range(check, "out", out, 3, std::min(q.shape[3], kMaxLatentValueDim), "the head dim of values");
  check.writable("out", out);
  check.apart("out", out, {{"q", q}, {"latent_pages", latent}, {"block_table", block_table}, {"seq_lens", seq_lens}});
  if (!lse.defined()) return;
  check.dtype("lse", lse, DType::kFloat32);
  check.ndim("lse", lse, 3, 3);
  for (int d = 0; d < 3; ++d) check.extent("lse", lse, d, q.shape[d], "q's shape without its last dim");
  check.writable("lse", lse);
  check.no_overlap("out", out, "lse", lse);
  check.apart("lse", lse, {{"q", q}, {"latent_pages", latent}, {"block_table", block_table}, {"seq_lens", seq_lens}});
}

void fill(const TensorView& q, const TensorView& latent, const TensorView& block_table, const TensorView& out,
          const TensorView& lse, AttentionParams& p) {
  p.dtype = p.dtype_q = q.dtype;
  p.device = q.device;
  p.batch = q.shape[0];
  p.heads_q = q.shape[1];
  p.seq_q = q.shape[2];
  p.heads_kv = 1;
  p.head_dim = q.shape[3];
  p.head_dim_v = out.shape[3];
  p.q = q.data;
  p.k = p.v = latent.data;
  p.out = out.data;
  p.stride_q_batch = q.strides[0];
  p.stride_q_head = q.strides[1];
  p.stride_q_token = q.strides[2];
  p.stride_k_batch = p.stride_v_batch = latent.strides[0];
  p.stride_k_token = p.stride_v_token = latent.strides[1];
  p.stride_k_head = p.stride_v_head = latent.shape[2];  // of a second head, if there were one
  p.stride_out_batch = out.strides[0];
  p.stride_out_head = out.strides[1];
  p.stride_out_token = out.strides[2];
  if (lse.defined()) {
    p.lse = static_cast<float*>(lse.data);
    p.stride_lse_batch = lse.strides[0];
    p.stride_lse_head = lse.strides[1];
    p.stride_lse_token = lse.strides[2];
  }
  p.num_pages = latent.shape[0];
  p.page_size = latent.shape[1];
  set_block_table(block_table, p);
}

}  // namespace

void attention_mla_decode(const TensorView& q, const TensorView& latent_pages, const TensorView& block_table,
                          const TensorView& seq_lens, const TensorView& latent_scale, const TensorView& out,
                          const TensorView& lse, float scale, bool causal, bool check_pages,
                          const ExecutionContext& context) {
  const Checker check("attention_mla_decode", q.device);
  check_operand(check, "q", q, q, 4);
  check_range(check, "q", q, 3, kMaxLatentDim, "a head dim");
  const bool narrow = latent_pages.defined() && is_byte(latent_pages.dtype);
  if (!narrow) {
    check_operand(check, "latent_pages", latent_pages, q, 3);
    check.extent("latent_pages", latent_pages, 2, q.shape[3], "q.shape[3]");
    if (latent_scale.defined())
      check.fail(std::string("latent_scale is given, but latent_pages is ") + dtype_name(latent_pages.dtype) +
                 "; it is for float8_e4m3fn");
    check_pages_there(check, latent_pages);
  }
  if (!std::isfinite(scale)) check.fail("scale=" + std::to_string(scale) + "; needs a finite number");
  check.dtype("block_table", block_table, DType::kInt32);
  check.ndim("block_table", block_table, 2, 2);
  check.last_dim_contiguous("block_table", block_table);
  check.extent("block_table", block_table, 0, q.shape[0], "q.shape[0], a row for each sequence");
  check.index("seq_lens", seq_lens);
  check_results(check, q, latent_pages, block_table, seq_lens, out, lse);
  MlaDecodeParams params;
  if (narrow) {
    params.format = check_narrow(check, latent_pages, latent_scale, out.shape[3], q.shape[3]);
    check_pages_there(check, latent_pages);
    check.apart("out", out, {{"latent_scale", latent_scale}});
    check.apart("lse", lse, {{"latent_scale", latent_scale}});
  }

  AttentionParams& p = params.attention;
  IndexCopies copies(check.device());
  fill(q, latent_pages, block_table, out, lse, p);
  if (narrow) p.dtype = DType::kFloat8E4M3;
  p.seq_lens = check.index_array("seq_lens", seq_lens, p.batch, copies);
  check_lengths(check, p);
  p.scale = scale;
  p.causal = causal && p.seq_q > 1;
  p.window_right = p.causal ? 0 : -1;
  check_page_ids(check, copies, p);
  if (check_pages && p.device.is_cuda() && !context.explain) {
    FindBadPageParams table = page_table_params(Checker("check_block_table", block_table.device), block_table, seq_lens,
                                                p.num_pages, p.page_size, copies);
    table.seq_q = p.seq_q;
    check_page_table(table, context);
  }
  if (out.numel() == 0 && !context.explain) return;
  dispatch(params, p.device, context);
}

void latent_append(const TensorView& latent, const TensorView& key, const TensorView& latent_pages,
                   const TensorView& slots, const TensorView& latent_scale, const ExecutionContext& context) {
  const Checker check("latent_append", latent_pages.device);
  check.tensor("latent_pages", latent_pages);
  if (!is_byte(latent_pages.dtype))
    check.fail(std::string("latent_pages is ") + dtype_name(latent_pages.dtype) +
               "; needs uint8 or float8_e4m3fn (kv_append writes rows of more bits)");
  check.writable("latent_pages", latent_pages);
  const auto check_rows = [&](const char* name, const TensorView& view) {
    check.floating(name, view);
    check.ndim(name, view, 2, 2);
    check.last_dim_contiguous(name, view);
  };
  check_rows("latent", latent);
  check_rows("key", key);
  check.dtype("key", key, latent.dtype);
  check.extent("key", key, 0, latent.shape[0], "latent.shape[0]");
  check_range(check, "latent", latent, 1, kMaxLatentValueDim, "latent columns");
  if (latent.shape[1] + key.shape[1] > kMaxLatentDim)
    check.fail(shape_text("latent", latent, 1) + ", " + shape_text("key", key, 1) + "; together they must be at most " +
               std::to_string(kMaxLatentDim));
  LatentAppendParams p;
  p.format = check_narrow(check, latent_pages, latent_scale, latent.shape[1], latent.shape[1] + key.shape[1]);
  check_pages_there(check, latent_pages);
  check.apart("latent_pages", latent_pages,
              {{"latent", latent}, {"key", key}, {"slots", slots}, {"latent_scale", latent_scale}});
  IndexCopies copies(check.device());
  p.dtype = latent.dtype;
  p.device = check.device();
  p.tokens = latent.shape[0];
  p.turned = key.shape[1];
  p.latent = latent.data;
  p.key = key.data;
  p.stride_latent = latent.strides[0];
  p.stride_key = key.strides[0];
  p.pages = static_cast<std::uint8_t*>(latent_pages.data);
  p.num_pages = latent_pages.shape[0];
  p.page_size = latent_pages.shape[1];
  p.stride_page = latent_pages.strides[0];
  p.stride_slot = latent_pages.strides[1];
  p.slots = check.index_array("slots", slots, p.tokens, copies);
  check.indices_in_range("slots", p.slots, p.tokens, std::numeric_limits<std::int64_t>::min(),
                         p.num_pages * p.page_size, "num_pages * page_size");
  if (p.tokens == 0 && !context.explain) return;
  dispatch(p, p.device, context);
}

}  // namespace flashkernel
