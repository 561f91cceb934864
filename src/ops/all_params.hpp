// The list of ops: one params struct each. A new op is added here and in the backends' tables.
#pragma once

#include "ops/attention_params.hpp"
#include "ops/elementwise_params.hpp"
#include "ops/kv_params.hpp"
#include "ops/linear_params.hpp"
#include "ops/loss_params.hpp"
#include "ops/norm_params.hpp"
#include "ops/reduce_params.hpp"
#include "ops/rope_params.hpp"

namespace flashkernel {

template <class... Params>
struct ParamsList {};

using AllParams = ParamsList<AttentionParams, AttentionBackwardParams, MergeStatesParams, RopeParams, LinearParams,
                             LinearBackwardParams, AddParams, SwigluParams, SwigluBackwardParams, ReduceParams,
                             SoftmaxParams, SoftmaxBackwardParams, NormParams, NormBackwardParams, CrossEntropyParams,
                             CrossEntropyBackwardParams, KvAppendParams, KvReadParams, KvCopyParams, FindBadPageParams>;

}  // namespace flashkernel
