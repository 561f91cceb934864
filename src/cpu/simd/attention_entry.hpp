// The launch of a fast CPU attention forward: plan the workspace, cut the call into tasks, run each sequence by the
// path that suits its number of rows. Included by the architectures' attention_fwd.cpp, which supply `Path`: the
// many-row kernel. Invariant: the path depends on the sequence alone, never on its batch mates or on the number of
// threads.
#pragma once

#include "core/thread_pool.hpp"
#include "cpu/simd/attention_decode.hpp"
#include "cpu/simd/few_rows.hpp"

namespace flashkernel::cpu {
namespace {

// The one call that cuts tasks and plans memory; `launch` and `workspace_bytes` walk it alike.
struct DecodeSplit {
  std::int64_t chunks = 0;  // 0: keys are not split
  std::int64_t part_floats = 0;
  int heads = 1;  // most kv heads of a task
};

inline DecodeSplit plan_split(const AttentionParams& p, int num_threads, FewRows few_rows) {
  if (few_rows == FewRows::kPack) return {};
  const std::int64_t rows = p.seq_q * (p.heads_q / p.heads_kv);
  const std::int64_t longest = p.block_table ? p.max_pages * p.page_size : p.seq_k, chunks = ceil_div(longest, kChunk);
  DecodeSplit s;
  s.heads = heads_together(p, rows > kDecodeRows ? 1 : rows);  // of mixed lengths, those of few rows take fewer
  if (rows > kDecodeRows || num_threads == 1) return s;
  const auto tasks = [&] { return p.batch * ceil_div(p.heads_kv, std::int64_t{s.heads}); };
  // Whole sequences balance well once there are a few for each thread; splitting costs the parts' memory and a fold.
  if (tasks() < std::int64_t{4} * num_threads && chunks > 1) {
    s.chunks = chunks;
    s.part_floats = part_floats(p, rows);
  }
  // Fewer heads a task where there are too few tasks for the threads.
  while (s.heads > 1 && tasks() * chunks < std::int64_t{4} * num_threads) s.heads = (s.heads + 1) / 2;
  return s;
}

template <class Path>
inline std::int64_t worker_bytes(const AttentionParams& p) {
  std::int64_t decode = 0;
  decode_scratch(p, nullptr, &decode);
  return round_up(imax(decode, Path::scratch_bytes(p)), 4096) + 4096 / 2;  // workers' scratch at unlike page offsets
}

template <class Path>
inline std::size_t attention_workspace(const AttentionParams& p, FewRows few_rows) {
  const int threads = num_workers();
  const DecodeSplit split = plan_split(p, threads, few_rows);
  return static_cast<std::size_t>(64 + round_up((p.batch + 1) * 8, 64) + threads * worker_bytes<Path>(p) +
                                  split.chunks * p.batch * p.heads_kv * round_up(split.part_floats * 4, 64));
}

template <class Path, class T, class K>
struct AttentionRun {
  const AttentionParams* p;
  TaskGrid grid;
  char* scratch;
  std::int64_t scratch_stride;
  DecodeSplit split;
  std::int64_t most_streamed;  // rows of a sequence
  float* parts;
  std::int64_t part_stride;  // floats

  static DecodeScratch decode_memory(const AttentionRun& run, int worker) {
    std::int64_t bytes;
    return decode_scratch(*run.p, run.scratch + worker * run.scratch_stride, &bytes);
  }
  static void blocks(void* context, std::int64_t begin, std::int64_t end, int worker) {
    const AttentionRun& run = *static_cast<AttentionRun*>(context);
    for (std::int64_t t = begin; t < end; ++t) {
      const Task task = find_task(*run.p, run.grid, t);
      const Sequence<T, K> seq = sequence_of<T, K>(*run.p, task.b, task.head_kv);
      if (seq.rows() <= run.most_streamed) {
        const int heads = imin(run.split.heads, heads_together(*run.p, seq.rows()));
        if (task.head_kv % heads != 0) continue;  // it goes with a head before it
        decode_task(seq, static_cast<int>(imin<std::int64_t>(heads, run.p->heads_kv - task.head_kv)),
                    decode_memory(run, worker));
      } else {
        const std::int64_t row0 = task.block * run.grid.rows_per_task;
        Path::run(seq, row0, imin(seq.rows(), row0 + run.grid.rows_per_task),
                  run.scratch + worker * run.scratch_stride);
      }
    }
  }
  static void split_parts(void* context, std::int64_t begin, std::int64_t end, int worker) {
    const AttentionRun& run = *static_cast<AttentionRun*>(context);
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t unit = t / run.split.chunks, chunk = t % run.split.chunks, key0 = chunk * kChunk;
      const std::int64_t heads_kv = run.p->heads_kv, units = ceil_div(heads_kv, std::int64_t{run.split.heads});
      const std::int64_t b = unit / units, head_kv = unit % units * run.split.heads;
      const Sequence<T, K> seq = sequence_of<T, K>(*run.p, b, head_kv);
      if (seq.rows() == 0 || key0 + kChunk <= seq.first_key(0) || key0 >= seq.last_key(seq.rows() - 1)) continue;
      decode_part(seq, static_cast<int>(imin<std::int64_t>(run.split.heads, heads_kv - head_kv)), key0,
                  decode_memory(run, worker),
                  run.parts + ((b * heads_kv + head_kv) * run.split.chunks + chunk) * run.part_stride,
                  run.split.chunks * run.part_stride);
    }
  }
  static void split_fold(void* context, std::int64_t begin, std::int64_t end, int worker) {
    const AttentionRun& run = *static_cast<AttentionRun*>(context);
    for (std::int64_t pair = begin; pair < end; ++pair) {
      const Sequence<T, K> seq = sequence_of<T, K>(*run.p, pair / run.p->heads_kv, pair % run.p->heads_kv);
      if (seq.rows() == 0) continue;
      decode_fold(seq, decode_memory(run, worker), run.parts + pair * run.split.chunks * run.part_stride,
                  run.part_stride);
    }
  }
};

template <class Path, class T, class K = T>
inline void launch_typed(const AttentionParams& p, void* workspace, FewRows few_rows) {
  const int threads = num_workers();
  Arena arena{reinterpret_cast<char*>(round_up(reinterpret_cast<std::intptr_t>(workspace), 64))};
  AttentionRun<Path, T, K> run;
  run.p = &p;
  std::int64_t* first_task = arena.take<std::int64_t>(p.batch + 1);
  run.grid = make_grid(p, Path::kStrip, Path::kLeast, Path::most(p), threads, first_task);
  run.scratch_stride = worker_bytes<Path>(p);
  run.scratch = arena.take<char>(threads * run.scratch_stride);
  run.split = plan_split(p, threads, few_rows);
  run.most_streamed = few_rows == FewRows::kStream ? kDecodeRows : -1;
  const std::int64_t pairs = p.batch * p.heads_kv;
  if (run.split.chunks == 0) {
    parallel_for(run.grid.num_tasks, 1, threads, run.blocks, &run);
    return;
  }
  run.part_stride = round_up(run.split.part_floats * 4, 64) / 4;
  run.parts = arena.take<float>(pairs * run.split.chunks * run.part_stride);
  const std::int64_t units = p.batch * ceil_div(p.heads_kv, std::int64_t{run.split.heads});
  parallel_for(units * run.split.chunks, 1, threads, run.split_parts, &run);
  parallel_for(pairs, 1, threads, run.split_fold, &run);
}

template <class Path>
inline void launch_attention(const AttentionParams& p, void* workspace, FewRows few_rows) {
  if (p.batch == 0 || p.heads_q == 0 || p.seq_q == 0) return;
  switch (p.dtype) {
    case DType::kFloat32: return launch_typed<Path, float>(p, workspace, few_rows);
    case DType::kFloat16: return launch_typed<Path, Half>(p, workspace, few_rows);
    case DType::kBFloat16: return launch_typed<Path, BFloat>(p, workspace, few_rows);
    default: return;  // `supports` refuses others
  }
}

// Over pages of 8-bit elements.
template <class Path, class T>
inline void launch_quantized(const AttentionParams& p, void* workspace, FewRows few_rows) {
  return p.dtype == DType::kInt8 ? launch_typed<Path, T, Int8>(p, workspace, few_rows)
                                 : launch_typed<Path, T, Float8>(p, workspace, few_rows);
}
template <class Path>
inline void launch_attention_quantized(const AttentionParams& p, void* workspace, FewRows few_rows) {
  if (p.batch == 0 || p.heads_q == 0 || p.seq_q == 0) return;
  switch (p.dtype_q) {
    case DType::kFloat32: return launch_quantized<Path, float>(p, workspace, few_rows);
    case DType::kFloat16: return launch_quantized<Path, Half>(p, workspace, few_rows);
    case DType::kBFloat16: return launch_quantized<Path, BFloat>(p, workspace, few_rows);
    default: return;
  }
}

}  // namespace
}  // namespace flashkernel::cpu
