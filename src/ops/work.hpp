// How much a call has to do: what the cost models of both backends divide by their rates. Terms of sums for products
// and attention, elements for what is bound by memory. All rows of an op measure a call alike, so that their costs
// differ by their rates alone.
#pragma once

#include "ops/all_params.hpp"

namespace flashkernel {

namespace work {
inline double product(std::int64_t a, std::int64_t b) { return static_cast<double>(a) * static_cast<double>(b); }
inline double volume(const std::int64_t* shape, int ndim) {
  double elements = 1;
  for (int d = 0; d < ndim; ++d) elements *= static_cast<double>(shape[d]);
  return elements;
}
}  // namespace work

inline double work_of(const AttentionParams& p) {
  return work::product(p.batch * p.heads_q, p.seq_q) * work::product(p.seq_k, p.head_dim + p.head_dim_v);
}
inline double work_of(const AttentionBackwardParams& p) { return 2.5 * work_of(p.forward); }
inline double work_of(const LinearParams& p) {
  return work::product(p.rows, p.in_features) * static_cast<double>(p.out_features);
}
inline double work_of(const LinearBackwardParams& p) {
  return 2 * work::product(p.rows, p.in_features) * static_cast<double>(p.out_features);
}
inline double work_of(const AddParams& p) { return work::volume(p.shape, p.ndim); }
inline double work_of(const SwigluParams& p) { return work::volume(p.shape, p.ndim); }
inline double work_of(const SwigluBackwardParams& p) { return work::volume(p.shape, p.ndim); }
inline double work_of(const ReduceParams& p) { return work::product(p.kept_count, p.reduced_count); }
inline double work_of(const SoftmaxParams& p) { return work::product(p.rows, p.columns); }
inline double work_of(const SoftmaxBackwardParams& p) { return work::product(p.rows, p.columns); }
inline double work_of(const NormParams& p) { return work::product(p.rows, p.features); }
inline double work_of(const NormBackwardParams& p) { return work::product(p.rows, p.features); }
inline double work_of(const CrossEntropyParams& p) { return work::product(p.rows, p.classes); }
inline double work_of(const CrossEntropyBackwardParams& p) { return work::product(p.rows, p.classes); }
inline double work_of(const RopeParams& p) {
  return work::product(p.batch * p.seq, (p.heads_q + p.heads_kv) * p.head_dim);
}
inline double work_of(const KvAppendParams& p) {
  return work::product(p.tokens, p.pages.heads_kv * (p.pages.head_dim + p.pages.head_dim_v));
}
inline double work_of(const KvReadParams& p) {
  return work::product(p.batch * p.max_seq, p.pages.heads_kv * (p.pages.head_dim + p.pages.head_dim_v));
}
inline double work_of(const KvCopyParams& p) {
  return work::product(p.count * p.pages.page_size, p.pages.heads_kv * (p.pages.head_dim + p.pages.head_dim_v));
}
inline double work_of(const FindBadPageParams& p) { return work::product(p.batch, p.max_pages); }
inline double work_of(const MergeStatesParams& p) { return work::volume(p.shape, 3) * static_cast<double>(p.head_dim); }

}  // namespace flashkernel
