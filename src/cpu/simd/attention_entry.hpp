// The launch of a fast CPU attention forward: plan the workspace, cut the call into tasks, run each sequence by the
// path that suits its number of rows. Included by the architectures' attention_fwd.cpp, which supply `Path`: the
// many-row kernel. Invariant: the path depends on the sequence alone, never on its batch mates or on the number of
// threads.
#pragma once

#include "core/thread_pool.hpp"
#include "cpu/simd/attention_decode.hpp"

namespace flashkernel::cpu {
namespace {

// The one call that cuts tasks and plans memory; `launch` and `workspace_bytes` walk it alike.
struct DecodeSplit {
  std::int64_t chunks = 0;  // 0: keys are not split
  std::int64_t part_floats = 0;
};

inline DecodeSplit plan_split(const AttentionParams& p, int num_threads) {
  const std::int64_t rows = p.seq_q * (p.heads_q / p.heads_kv), tasks = p.batch * p.heads_kv;
  DecodeSplit s;
  // Whole sequences balance well once there are a few for each thread; splitting costs the parts' memory and a fold.
  if (rows > kDecodeRows || tasks >= std::int64_t{4} * num_threads || num_threads == 1) return s;
  const std::int64_t longest = p.block_table ? p.max_pages * p.page_size : p.seq_k;
  if (longest <= kChunk) return s;
  s.chunks = ceil_div(longest, kChunk);
  s.part_floats = part_floats(p, rows);
  return s;
}

template <class Path>
inline std::int64_t worker_bytes(const AttentionParams& p) {
  std::int64_t decode = 0;
  decode_scratch(p, nullptr, &decode);
  return round_up(imax(decode, Path::scratch_bytes(p)), 4096) + 4096 / 2;  // workers' scratch at unlike page offsets
}

template <class Path>
inline std::size_t attention_workspace(const AttentionParams& p) {
  const int threads = num_workers();
  const DecodeSplit split = plan_split(p, threads);
  return static_cast<std::size_t>(64 + round_up((p.batch + 1) * 8, 64) + threads * worker_bytes<Path>(p) +
                                  split.chunks * p.batch * p.heads_kv * round_up(split.part_floats * 4, 64));
}

template <class Path, class T>
struct AttentionRun {
  const AttentionParams* p;
  TaskGrid grid;
  char* scratch;
  std::int64_t scratch_stride;
  DecodeSplit split;
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
      const Sequence<T> seq = sequence_of<T>(*run.p, task.b, task.head_kv);
      if (seq.rows() <= kDecodeRows) {
        decode_task(seq, decode_memory(run, worker));
      } else {
        const std::int64_t row0 = task.block * run.grid.rows_per_task;
        Path::template run<T>(seq, row0, imin(seq.rows(), row0 + run.grid.rows_per_task),
                              run.scratch + worker * run.scratch_stride);
      }
    }
  }
  static void split_parts(void* context, std::int64_t begin, std::int64_t end, int worker) {
    const AttentionRun& run = *static_cast<AttentionRun*>(context);
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t pair = t / run.split.chunks, key0 = t % run.split.chunks * kChunk;
      const Sequence<T> seq = sequence_of<T>(*run.p, pair / run.p->heads_kv, pair % run.p->heads_kv);
      if (seq.rows() == 0 || key0 + kChunk <= seq.first_key(0) || key0 >= seq.last_key(seq.rows() - 1)) continue;
      decode_part(seq, key0, decode_memory(run, worker), run.parts + t * run.part_stride);
    }
  }
  static void split_fold(void* context, std::int64_t begin, std::int64_t end, int worker) {
    const AttentionRun& run = *static_cast<AttentionRun*>(context);
    for (std::int64_t pair = begin; pair < end; ++pair) {
      const Sequence<T> seq = sequence_of<T>(*run.p, pair / run.p->heads_kv, pair % run.p->heads_kv);
      if (seq.rows() == 0) continue;
      decode_fold(seq, decode_memory(run, worker), run.parts + pair * run.split.chunks * run.part_stride,
                  run.part_stride);
    }
  }
};

template <class Path, class T>
inline void launch_typed(const AttentionParams& p, void* workspace) {
  const int threads = num_workers();
  Arena arena{reinterpret_cast<char*>(round_up(reinterpret_cast<std::intptr_t>(workspace), 64))};
  AttentionRun<Path, T> run;
  run.p = &p;
  std::int64_t* first_task = arena.take<std::int64_t>(p.batch + 1);
  run.grid = make_grid(p, Path::kStrip, Path::kLeast, Path::most(p), threads, first_task);
  run.scratch_stride = worker_bytes<Path>(p);
  run.scratch = arena.take<char>(threads * run.scratch_stride);
  run.split = plan_split(p, threads);
  const std::int64_t pairs = p.batch * p.heads_kv;
  if (run.split.chunks == 0) {
    parallel_for(run.grid.num_tasks, 1, threads, run.blocks, &run);
    return;
  }
  run.part_stride = round_up(run.split.part_floats * 4, 64) / 4;
  run.parts = arena.take<float>(pairs * run.split.chunks * run.part_stride);
  parallel_for(pairs * run.split.chunks, 1, threads, run.split_parts, &run);
  parallel_for(pairs, 1, threads, run.split_fold, &run);
}

template <class Path>
inline void launch_attention(const AttentionParams& p, void* workspace) {
  if (p.batch == 0 || p.heads_q == 0 || p.seq_q == 0) return;
  switch (p.dtype) {
    case DType::kFloat32: return launch_typed<Path, float>(p, workspace);
    case DType::kFloat16: return launch_typed<Path, Half>(p, workspace);
    case DType::kBFloat16: return launch_typed<Path, BFloat>(p, workspace);
    default: return;  // `supports` refuses others
  }
}

}  // namespace
}  // namespace flashkernel::cpu
