// Front door of attention_mla_decode: checks every argument, and describes the call as paged attention of one kv head.
// Called by users and by the bindings. Invariant: an error leaves out and lse untouched.
#include "flashkernel/attention_mla.hpp"

#include <cmath>

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
                          const TensorView& seq_lens, const TensorView& out, const TensorView& lse, float scale,
                          bool causal, bool check_pages, const ExecutionContext& context) {
  const Checker check("attention_mla_decode", q.device);
  check_operand(check, "q", q, q, 4);
  check_range(check, "q", q, 3, kMaxLatentDim, "a head dim");
  check_operand(check, "latent_pages", latent_pages, q, 3);
  check.extent("latent_pages", latent_pages, 2, q.shape[3], "q.shape[3]");
  if (latent_pages.shape[1] < 1)
    check.fail(shape_text("latent_pages", latent_pages, 1) + "; a page holds at least one token");
  if (!std::isfinite(scale)) check.fail("scale=" + std::to_string(scale) + "; needs a finite number");
  check.dtype("block_table", block_table, DType::kInt32);
  check.ndim("block_table", block_table, 2, 2);
  check.last_dim_contiguous("block_table", block_table);
  check.extent("block_table", block_table, 0, q.shape[0], "q.shape[0], a row for each sequence");
  check.index("seq_lens", seq_lens);
  check_results(check, q, latent_pages, block_table, seq_lens, out, lse);

  MlaDecodeParams params;
  AttentionParams& p = params.attention;
  IndexCopies copies(check.device());
  fill(q, latent_pages, block_table, out, lse, p);
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

}  // namespace flashkernel
