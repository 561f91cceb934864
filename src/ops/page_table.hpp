// The check of a page table by a kernel, shared by check_block_table (kv_ops.cpp) and attention_paged's checked mode
// (attention.cpp), which knows a window too.
#pragma once

#include "flashkernel/execution.hpp"
#include "ops/check.hpp"
#include "ops/kv_params.hpp"

namespace flashkernel {

/// Shapes and dtypes; the params look at every page that a sequence's length needs. `copies` holds the lengths.
FindBadPageParams page_table_params(const Checker& check, const TensorView& block_table, const TensorView& seq_lens,
                                    std::int64_t num_pages, std::int64_t page_size, IndexCopies& copies);

/// Throws BadBlockTable with the first bad entry that the kernel finds; waits for it.
void check_page_table(FindBadPageParams params, const ExecutionContext& context);

}  // namespace flashkernel
