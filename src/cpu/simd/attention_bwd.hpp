// The launch of attention's fast backward pass: how blocks are dealt to threads, the sums of the bias's and the sinks'
// gradients. Included by avx2/attention_bwd.cpp and avx512/attention_bwd.cpp after a vector type. Two ways over the
// same blocks:
//   whole   one task a kv head: dQ, dK and dV from one look at each pair of blocks (5 products); dQ's sums of all rows
//   wait in
//           the worker's scratch
//   split   tasks over row blocks for dQ (3 products), then over key blocks for dK and dV (4): when there are too few
//   heads for
//           the threads, when the rows' sums would not fit, or when one side is not asked for
// Invariant: both give the same bits, since every sum is the same chain of additions (attention_bwd_block.hpp).
#pragma once

#include "core/thread_pool.hpp"
#include "cpu/simd/attention_bwd_rest.hpp"

namespace flashkernel::cpu {
namespace {

constexpr std::int64_t kWholeRowBytes = std::int64_t{8} << 20;  // dQ's sums of one kv head a worker: 16k rows of 128

struct BackwardPlan {
  bool whole, rows, keys;                      // which tasks run
  std::int64_t d_stride, dv_stride, row_sums;  // floats a row; rows of dQ sums a worker keeps
};

inline BackwardPlan plan_backward(const AttentionBackwardParams& bp, int threads) {
  const AttentionParams& p = bp.forward;
  BackwardPlan plan{};
  plan.d_stride = round_up(p.head_dim, kBwdPanel);
  plan.dv_stride = round_up(p.head_dim_v, kBwdPanel);
  const std::int64_t rows = round_up(p.seq_q * (p.heads_q / imax<std::int64_t>(p.heads_kv, 1)), kBwdRows);
  const std::int64_t pairs = p.batch * p.heads_kv;
  const bool want_keys = bp.grad_k || bp.grad_v;
  // 5 products for each of the busiest thread's heads against 7 spread evenly.
  const bool fits = rows * plan.d_stride * 4 <= kWholeRowBytes && ceil_div(pairs, threads) * 5 * threads <= 7 * pairs;
  plan.whole = bp.grad_q && want_keys && fits;
  plan.rows = bp.grad_q && !plan.whole;
  plan.keys = want_keys && !plan.whole;
  plan.row_sums = plan.whole ? rows : kBwdRows;
  return plan;
}

struct BackwardScratch {
  KeyBlock keys;
  RowBlock* rows;
  PairScratch pair;
  float* grad_score;  // [kBwdRows][kBwdStride]; null without a bias gradient
  double* bias_sums;  // [kBwdRows][kBwdKeys]; the same
  float* dq;          // [row_sums][d_stride]
};

// Lays a worker's scratch out at `memory`, which may be null; returns its bytes.
inline std::int64_t carve(const AttentionBackwardParams& bp, const BackwardPlan& plan, char* memory,
                          BackwardScratch* w) {
  char* const base = memory ? memory : reinterpret_cast<char*>(64);  // any aligned address will do to count with
  Arena arena{base};
  const AttentionParams& p = bp.forward;
  w->keys.k_t = arena.take<float>(kBwdKeys * p.head_dim);
  w->keys.v_t = arena.take<float>(kBwdKeys * p.head_dim_v);
  w->keys.k = arena.take<float>(kBwdKeys * plan.d_stride);
  w->keys.dk = arena.take<float>(kBwdKeys * plan.d_stride);
  w->keys.dv = arena.take<float>(kBwdKeys * plan.dv_stride);
  w->rows = arena.take<RowBlock>(1);
  float* const q_t = arena.take<float>(kBwdRows * p.head_dim);
  float* const g_t = arena.take<float>(kBwdRows * p.head_dim_v);
  float* const q = arena.take<float>(kBwdRows * plan.d_stride);
  float* const g = arena.take<float>(kBwdRows * plan.dv_stride);
  if (memory) {
    w->rows->q_t = q_t;
    w->rows->g_t = g_t;
    w->rows->q = q;
    w->rows->g = g;
  }
  w->pair.p = arena.take<float>(kBwdRows * kBwdStride);
  w->pair.ds = arena.take<float>(kBwdRows * kBwdStride);
  w->grad_score = bp.grad_bias ? arena.take<float>(kBwdRows * kBwdStride) : nullptr;
  w->bias_sums = bp.grad_bias ? arena.take<double>(kBwdRows * kBwdKeys) : nullptr;
  w->dq = bp.grad_q ? arena.take<float>(plan.row_sums * plan.d_stride) : nullptr;
  return arena.at - base;
}

inline std::size_t backward_workspace(const AttentionBackwardParams& bp) {
  const int threads = num_workers();
  BackwardScratch unused;
  return static_cast<std::size_t>(threads * round_up(carve(bp, plan_backward(bp, threads), nullptr, &unused), 64) + 64 +
                                  LseRests<float>::floats(bp) * 4);
}

inline void fill_zero(float* to, std::int64_t count) {  // count: a multiple of the vector width
  for (std::int64_t i = 0; i < count; i += Vec::kWidth) Vec::store(to + i, Vec::zero());
}

// to[x] = scale * sums[x]
template <class T>
inline void write_row(T* to, const float* sums, int columns, float scale) {
  for (int x = 0; x < columns; x += Vec::kWidth)
    Vec::store_first(to + x, Vec::mul(Vec::load(sums + x), Vec::set1(scale)), imin(Vec::kWidth, columns - x));
}

template <class T>
struct BackwardRun {
  const AttentionBackwardParams* bp;
  BackwardPlan plan;
  char* memory;
  std::int64_t worker_bytes;
  const float* lse_rests;

  BackwardSequence<T> sequence(std::int64_t b, std::int64_t head_kv) const {
    auto seq = backward_sequence<T>(*bp, b, head_kv);
    seq.lse_rests = lse_rests;
    return seq;
  }
  BackwardScratch scratch(int worker) const {
    BackwardScratch w;
    carve(*bp, plan, memory + worker * worker_bytes, &w);
    return w;
  }

  // Whether any row of [row0, row1) sees a key of [key0, key1): rows are token-major, so the first and the last tell.
  static bool meet(const BackwardSequence<T>& seq, std::int64_t row0, std::int64_t row1, std::int64_t key0,
                   std::int64_t key1) {
    return seq.first_key(row0) < key1 && seq.last_key(row1 - 1) > key0;
  }

  // Every row against one block of keys: dK and dV, and dQ's sums where `dq` (of row 0) is not null.
  void key_block(const BackwardSequence<T>& seq, std::int64_t key0, BackwardScratch& w, float* dq,
                 bool want_keys) const {
    const AttentionParams& p = bp->forward;
    const int d = static_cast<int>(p.head_dim), dv = static_cast<int>(p.head_dim_v);
    load_keys(seq, key0, &w.keys);
    fill_zero(w.keys.dk, kBwdKeys * plan.d_stride);
    fill_zero(w.keys.dv, kBwdKeys * plan.dv_stride);
    for (std::int64_t row0 = 0; row0 < seq.rows(); row0 += kBwdRows) {
      if (!meet(seq, row0, imin(row0 + kBwdRows, seq.rows()), key0, key0 + w.keys.keys)) continue;
      load_rows(seq, row0, w.rows);
      PairPlan pair;
      if (pair_scores(seq, w.keys, *w.rows, w.pair, &pair, nullptr))
        add_gradients(w.keys, *w.rows, w.pair, pair, d, dv, dq ? dq + row0 * plan.d_stride : nullptr, want_keys);
    }
    for (int c = 0; c < w.keys.keys; ++c) {
      if (bp->grad_k) write_row(seq.grad_k_row(key0 + c), w.keys.dk + c * plan.d_stride, d, p.scale);
      if (bp->grad_v) write_row(seq.grad_v_row(key0 + c), w.keys.dv + c * plan.dv_stride, dv, 1.0f);
    }
  }

  static void whole_tasks(void* context, std::int64_t begin, std::int64_t end, int worker) {
    const BackwardRun& run = *static_cast<BackwardRun*>(context);
    const AttentionParams& p = run.bp->forward;
    BackwardScratch w = run.scratch(worker);
    for (std::int64_t task = begin; task < end; ++task) {
      const auto seq = run.sequence(task / p.heads_kv, task % p.heads_kv);
      fill_zero(w.dq, round_up(seq.rows(), kBwdRows) * run.plan.d_stride);
      for (std::int64_t key0 = 0; key0 < seq.k_len; key0 += kBwdKeys) run.key_block(seq, key0, w, w.dq, true);
      for (std::int64_t row = 0; row < seq.rows(); ++row)
        write_row(seq.grad_q_row(row), w.dq + row * run.plan.d_stride, static_cast<int>(p.head_dim), p.scale);
    }
  }

  std::int64_t key_blocks() const { return ceil_div(bp->forward.seq_k, kBwdKeys); }
  std::int64_t row_blocks() const {
    return ceil_div(bp->forward.seq_q * (bp->forward.heads_q / bp->forward.heads_kv), kBwdRows);
  }

  static void key_tasks(void* context, std::int64_t begin, std::int64_t end, int worker) {
    const BackwardRun& run = *static_cast<BackwardRun*>(context);
    const AttentionParams& p = run.bp->forward;
    BackwardScratch w = run.scratch(worker);
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t pair = task / run.key_blocks(), key0 = task % run.key_blocks() * kBwdKeys;
      const auto seq = run.sequence(pair / p.heads_kv, pair % p.heads_kv);
      if (key0 < seq.k_len) run.key_block(seq, key0, w, nullptr, true);
    }
  }

  static void row_tasks(void* context, std::int64_t begin, std::int64_t end, int worker) {
    const BackwardRun& run = *static_cast<BackwardRun*>(context);
    const AttentionParams& p = run.bp->forward;
    const int d = static_cast<int>(p.head_dim), dv = static_cast<int>(p.head_dim_v);
    BackwardScratch w = run.scratch(worker);
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t pair = task / run.row_blocks(), row0 = task % run.row_blocks() * kBwdRows;
      const auto seq = run.sequence(pair / p.heads_kv, pair % p.heads_kv);
      if (row0 >= seq.rows()) continue;
      load_rows(seq, row0, w.rows);
      fill_zero(w.dq, kBwdRows * run.plan.d_stride);
      for (std::int64_t key0 = 0; key0 < seq.k_len; key0 += kBwdKeys) {
        if (!meet(seq, row0, row0 + w.rows->rows, key0, imin(key0 + kBwdKeys, seq.k_len))) continue;
        load_keys(seq, key0, &w.keys);
        PairPlan plan;
        if (pair_scores(seq, w.keys, *w.rows, w.pair, &plan, nullptr))
          add_gradients(w.keys, *w.rows, w.pair, plan, d, dv, w.dq, false);
      }
      for (int r = 0; r < w.rows->rows; ++r)
        write_row(seq.grad_q_row(row0 + r), w.dq + r * run.plan.d_stride, d, p.scale);
    }
  }

  // The bias's gradient: a task owns a block of its elements and sums, in double and in one order, over all that they
  // were broadcast to. A dim of 1 is one block that stands for the whole extent.
  struct BiasTasks {
    std::int64_t blocks[4];  // batch, heads, row blocks, key blocks
    std::int64_t count() const { return blocks[0] * blocks[1] * blocks[2] * blocks[3]; }
  };
  BiasTasks bias_tasks() const {
    const std::int64_t* shape = bp->grad_bias_shape;
    return {{shape[0], shape[1], shape[2] == 1 ? 1 : ceil_div(shape[2], kBwdRows),
             shape[3] == 1 ? 1 : ceil_div(shape[3], kBwdKeys)}};
  }

  static void store_bias(const AttentionBackwardParams& bp, std::int64_t at, double value) {
    const Vec::Reg x = Vec::set1(static_cast<float>(value));
    switch (bp.grad_bias_dtype) {
      case DType::kFloat32: return Vec::store_first(static_cast<float*>(bp.grad_bias) + at, x, 1);
      case DType::kFloat16: return Vec::store_first(static_cast<Half*>(bp.grad_bias) + at, x, 1);
      default: return Vec::store_first(static_cast<BFloat*>(bp.grad_bias) + at, x, 1);
    }
  }

  static void bias_task(const BackwardRun& run, const BiasTasks& tasks, std::int64_t task, BackwardScratch& w) {
    const AttentionBackwardParams& bp = *run.bp;
    const AttentionParams& p = bp.forward;
    const std::int64_t extent[4] = {p.batch, p.heads_q, p.seq_q, p.seq_k};
    const std::int64_t step[4] = {1, 1, kBwdRows, kBwdKeys};
    std::int64_t begin[4], end[4], size[4];
    bool sums[4];
    for (int dim = 3; dim >= 0; --dim) {
      const std::int64_t block = task % tasks.blocks[dim];
      task /= tasks.blocks[dim];
      sums[dim] = bp.grad_bias_shape[dim] == 1;
      begin[dim] = sums[dim] ? 0 : block * step[dim];
      end[dim] = sums[dim] ? extent[dim] : imin(begin[dim] + step[dim], extent[dim]);
      size[dim] = sums[dim] ? 1 : end[dim] - begin[dim];
    }
    for (std::int64_t i = 0; i < size[2] * kBwdKeys; ++i) w.bias_sums[i] = 0;
    const std::int64_t group = p.heads_q / p.heads_kv;
    for (std::int64_t b = begin[0]; b < end[0]; ++b) {
      for (std::int64_t h = begin[1]; h < end[1]; ++h) {
        auto seq = run.sequence(b, h / group);  // and of it one query head: rows are tokens
        seq.head0 = h;
        seq.group = 1;
        for (std::int64_t key0 = begin[3]; key0 < end[3]; key0 += kBwdKeys) {
          load_keys(seq, key0, &w.keys);
          for (std::int64_t row0 = begin[2]; row0 < end[2]; row0 += kBwdRows) {
            if (!meet(seq, row0, imin(row0 + kBwdRows, end[2]), key0, key0 + w.keys.keys)) continue;
            load_rows(seq, row0, w.rows);
            PairPlan plan;
            if (!pair_scores(seq, w.keys, *w.rows, w.pair, &plan, w.grad_score)) continue;
            for (int r = 0; r < w.rows->rows; ++r) {
              double* const to = w.bias_sums + (sums[2] ? 0 : r) * kBwdKeys;
              const float* const from = w.grad_score + r * kBwdStride;
              const int last = imin(plan.to[r / kBwdStrip], w.keys.keys);
              for (int c = plan.from[r / kBwdStrip]; c < last; ++c) to[sums[3] ? 0 : c] += from[c];
            }
          }
        }
      }
    }
    const std::int64_t* stride = bp.stride_grad_bias;
    const auto first = [&](int dim) { return sums[dim] ? 0 : begin[dim]; };
    const std::int64_t corner =
        first(0) * stride[0] + first(1) * stride[1] + first(2) * stride[2] + first(3) * stride[3];
    for (std::int64_t r = 0; r < size[2]; ++r)
      for (std::int64_t c = 0; c < size[3]; ++c)
        store_bias(bp, corner + r * stride[2] + c * stride[3], w.bias_sums[r * kBwdKeys + c]);
  }

  static void run_bias_tasks(void* context, std::int64_t begin, std::int64_t end, int worker) {
    const BackwardRun& run = *static_cast<BackwardRun*>(context);
    const BiasTasks tasks = run.bias_tasks();
    BackwardScratch w = run.scratch(worker);
    for (std::int64_t task = begin; task < end; ++task) bias_task(run, tasks, task, w);
  }

  // dsink = -sum over rows of exp(sink - lse) * delta.
  static void sink_tasks(void* context, std::int64_t begin, std::int64_t end, int) {
    const BackwardRun& run = *static_cast<BackwardRun*>(context);
    const AttentionParams& p = run.bp->forward;
    for (std::int64_t h = begin; h < end; ++h) {
      const float sink = p.sinks[h];
      double sum = 0;
      for (std::int64_t b = 0; b < p.batch; ++b) {
        auto seq = run.sequence(b, h / (p.heads_q / p.heads_kv));
        seq.head0 = h;
        seq.group = 1;
        for (std::int64_t row = 0; row < seq.rows(); ++row) {
          const float lse = *seq.lse(row);
          if (sink == kNegInf || lse == kNegInf) continue;
          float weight[Vec::kWidth];
          Vec::store(weight, Vec::exp2<6>(Vec::set1(((sink - lse) - seq.lse_rest(row)) * kLog2E)));
          sum -= static_cast<double>(weight[0]) * seq.delta(row);
        }
      }
      run.bp->grad_sinks[h] = static_cast<float>(sum);
    }
  }
};

template <class T>
inline void launch_backward_typed(const AttentionBackwardParams& bp, void* workspace) {
  const int threads = num_workers();
  const AttentionParams& p = bp.forward;
  BackwardRun<T> run;
  run.bp = &bp;
  run.plan = plan_backward(bp, threads);
  run.memory = reinterpret_cast<char*>(round_up(reinterpret_cast<std::intptr_t>(workspace), 64));
  BackwardScratch unused;
  run.worker_bytes = round_up(carve(bp, run.plan, nullptr, &unused), 64);
  LseRests<T> rests{&bp, reinterpret_cast<float*>(run.memory + threads * run.worker_bytes)};
  run.lse_rests = rests.make(threads);
  const std::int64_t pairs = p.batch * p.heads_kv;
  if (run.plan.whole) parallel_for(pairs, 1, threads, run.whole_tasks, &run);
  if (run.plan.rows) parallel_for(pairs * run.row_blocks(), 1, threads, run.row_tasks, &run);
  if (run.plan.keys) parallel_for(pairs * run.key_blocks(), 1, threads, run.key_tasks, &run);
  if (bp.grad_bias) parallel_for(run.bias_tasks().count(), 1, threads, run.run_bias_tasks, &run);
  if (bp.grad_sinks) parallel_for(p.heads_q, 1, threads, run.sink_tasks, &run);
}

inline void launch_backward(const AttentionBackwardParams& bp, void* workspace) {
  if (bp.forward.heads_kv == 0 || bp.forward.heads_q == 0) return;
  switch (bp.forward.dtype) {
    case DType::kFloat32: return launch_backward_typed<float>(bp, workspace);
    case DType::kFloat16: return launch_backward_typed<Half>(bp, workspace);
    case DType::kBFloat16: return launch_backward_typed<BFloat>(bp, workspace);
    default: return;  // the front door refuses others
  }
}

}  // namespace
}  // namespace flashkernel::cpu
