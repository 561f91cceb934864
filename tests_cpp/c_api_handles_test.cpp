// What the C API adds to the C++ one: statuses, messages and sizes, structs that grow, and handles in any order.
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "c_api/both.hpp"

namespace flashkernel::c_api_tests {
namespace {

TEST(CApi, ErrorsHaveAStatusAMessageAndNumbers) {
  Floats x(6), out(6);
  Both xv(x, {2, 3}), other(out, {3, 2});
  EXPECT_EQ(fk_add(&xv.c, &xv.c, &other.c, nullptr), FK_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(fk_last_error_message()).rfind("add: out is float32[3, 2]", 0), 0u) << fk_last_error_message();
  EXPECT_EQ(fk_add(nullptr, &xv.c, &xv.c, nullptr), FK_INVALID_ARGUMENT);
  const auto refused = [&](auto change) {
    fk_tensor bad = xv.c;
    change(bad);
    EXPECT_EQ(fk_add(&bad, &xv.c, &xv.c, nullptr), FK_INVALID_ARGUMENT);
    return std::string(fk_last_error_message());
  };
  EXPECT_EQ(refused([](auto& t) { t.dtype = 10; }),
            "add: a.dtype is 10; it must be FK_FLOAT32 (0) to FK_FLOAT4_E2M1X2 (9)");
  EXPECT_EQ(refused([](auto& t) { t.ndim = 9; }), "add: a has 9 dims; there are 0 to 8");
  EXPECT_EQ(refused([](auto& t) { t.ndim = -1; }), "add: a has -1 dims; there are 0 to 8");
  EXPECT_EQ(refused([](auto& t) { t.shape[1] = -3; }), "add: a.shape[1]=-3; it must not be negative");
  EXPECT_EQ(refused([](auto& t) { t.shape[0] = t.shape[1] = INT64_MAX; }), "add: a has more than 2^63 - 1 elements");
  EXPECT_EQ(refused([](auto& t) { t.device.type = 7; }), "add: a.device.type is 7; it must be FK_CPU or FK_CUDA");
  EXPECT_EQ(refused([](auto& t) { t.device.index = 1; }), "add: a.device.index is 1; on the CPU it is 0");
  EXPECT_EQ(refused([](auto& t) { t.device = {FK_CUDA, -1}; }), "add: a.device.index is -1; it must not be negative");
  EXPECT_NE(refused([](auto& t) { t.data = nullptr; }).find("null"), std::string::npos);

  auto options = made(fk_attention_options_init);
  options.causal = 2;
  EXPECT_EQ(fk_attention(&xv.c, &xv.c, &xv.c, &xv.c, nullptr, &options, nullptr), FK_INVALID_ARGUMENT);
  EXPECT_STREQ(fk_last_error_message(), "attention: causal is 2; it must be 0 or 1");
  EXPECT_EQ(fk_linear(&xv.c, &xv.c, nullptr, &xv.c, nullptr, 4, nullptr), FK_INVALID_ARGUMENT);
  EXPECT_EQ(fk_set_num_threads(0), FK_INVALID_ARGUMENT);
  EXPECT_EQ(fk_force_kernels("no_such_kernel"), FK_INVALID_ARGUMENT);
  EXPECT_EQ(fk_force_kernels(nullptr), FK_INVALID_ARGUMENT);

  auto pages = made(fk_kv_page_pool_options_init);
  pages.num_pages = 3, pages.heads_kv = 1, pages.head_dim = 8, pages.page_size = 16;
  fk_kv_page_pool* pool = nullptr;
  ASSERT_EQ(fk_kv_page_pool_create(&pages, nullptr, &pool), FK_OK);
  int32_t taken[4];
  EXPECT_EQ(fk_kv_page_pool_take(pool, 4, taken), FK_OUT_OF_PAGES);
  fk_error_details details;
  ASSERT_EQ(fk_last_error_details(&details, sizeof details), FK_OK);
  EXPECT_EQ(details.status, FK_OUT_OF_PAGES);
  EXPECT_EQ(details.requested_pages, 4u);
  EXPECT_EQ(details.free_pages, 3u);
  EXPECT_EQ(details.num_pages, 3u);
  EXPECT_EQ(details.requested_bytes, 4 * fk_kv_page_pool_page_bytes(pool));
  EXPECT_EQ(fk_kv_page_pool_give_back(pool, -1, taken), FK_INVALID_ARGUMENT);
  fk_kv_page_pool_destroy(pool);

  const std::vector<int32_t> table = {0, 7}, lengths = {16, 1};
  const Both tv(table.data(), FK_INT32, {2, 1}), lv(lengths.data(), FK_INT32, {2});
  EXPECT_EQ(fk_check_block_table(&tv.c, &lv.c, 4, 16, nullptr), FK_BAD_BLOCK_TABLE);
  ASSERT_EQ(fk_last_error_details(&details, sizeof details), FK_OK);
  EXPECT_EQ(details.sequence, 1);
  EXPECT_EQ(details.slot, 0);
  EXPECT_EQ(details.page, 7);
  EXPECT_EQ(details.requested_pages, 0u);
}

TEST(CApi, ADeviceThatIsNotThereIsRefused) {
  const int count = fk_num_cuda_devices();
  fk_memory* memory = nullptr;
  const fk_status status = fk_memory_default_create({FK_CUDA, count}, &memory);
  if (count == 0)
    EXPECT_EQ(status, FK_UNSUPPORTED);
  else
    EXPECT_NE(status, FK_OK);
  EXPECT_EQ(memory, nullptr);
}

TEST(CApi, EachThreadHasItsOwnError) {
  EXPECT_EQ(fk_set_num_threads(-5), FK_INVALID_ARGUMENT);
  const std::string mine = fk_last_error_message();
  std::thread([] {
    EXPECT_STREQ(fk_last_error_message(), "");
    EXPECT_EQ(fk_force_kernels("nothing/such"), FK_INVALID_ARGUMENT);
  }).join();
  EXPECT_EQ(fk_last_error_message(), mine);
}

// A struct of a later version, and a caller that was compiled with an earlier one.
struct Grown {
  size_t size;
  int32_t old_field;
  int32_t new_field;
};

}  // namespace
}  // namespace flashkernel::c_api_tests

namespace flashkernel::c {
template <>
inline constexpr std::size_t kFirstSize<c_api_tests::Grown> = offsetof(c_api_tests::Grown, new_field);
}

namespace flashkernel::c_api_tests {
namespace {

TEST(CApi, StructsMayGrow) {
  const Grown defaults{sizeof(Grown), 1, 2};
  Grown given{offsetof(Grown, new_field), 10, 20};
  Grown known = fk::c::take("grown", given, defaults);
  EXPECT_EQ(known.old_field, 10);
  EXPECT_EQ(known.new_field, 2) << "the caller does not know the field: its bytes are none of the library's";
  given.size = sizeof given;
  EXPECT_EQ(fk::c::take("grown", given, defaults).new_field, 20);
  given.size = sizeof given + 8;
  EXPECT_THROW(fk::c::take("grown", given, defaults), fk::InvalidArgument);
  given.size = 0;
  EXPECT_THROW(fk::c::take("grown", given, defaults), fk::InvalidArgument);
  Grown written{0, 0, 99};
  fk::c::give("grown", Grown{0, 5, 6}, &written, offsetof(Grown, new_field));
  EXPECT_EQ(written.size, offsetof(Grown, new_field));
  EXPECT_EQ(written.old_field, 5);
  EXPECT_EQ(written.new_field, 99) << "written past what the caller has";
}

TEST(CApi, UnknownSizesAreRefused) {
  Floats x(6);
  const Both xv(x, {2, 3});
  fk_context context{};
  EXPECT_EQ(fk_add(&xv.c, &xv.c, &xv.c, &context), FK_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fk_last_error_message()).find("size is 0"), std::string::npos) << fk_last_error_message();
  EXPECT_EQ(fk_context_init(&context, sizeof context + 1), FK_INVALID_ARGUMENT);
  EXPECT_EQ(fk_context_init(nullptr, sizeof context), FK_INVALID_ARGUMENT);
  EXPECT_OK(fk_context_init(&context, sizeof context));
  EXPECT_OK(fk_add(&xv.c, &xv.c, &xv.c, &context));
}

TEST(CApi, ExplainsAndForces) {
  const AttentionInputs in;
  Floats out(in.q.size(), 7.0f);
  const Both out_view(out, {2, 4, 5, 8});
  fk_explanation* explanation = nullptr;
  ASSERT_EQ(fk_explanation_create(&explanation), FK_OK);
  auto context = made(fk_context_init);
  context.explain = explanation;
  const std::string before = fk_forced_kernels();
  for (int repeat = 0; repeat < 2; ++repeat) {  // a second call writes it anew
    EXPECT_OK(fk_force_kernels("attention_fwd/cpu/scalar"));
    EXPECT_OK(fk_attention(&in.q_view.c, &in.k_view.c, &in.v_view.c, &out_view.c, nullptr, nullptr, &context));
    EXPECT_STREQ(fk_forced_kernels(), "attention_fwd/cpu/scalar");
    EXPECT_OK(fk_force_kernels(before.c_str()));
    EXPECT_STREQ(fk_explanation_kernel(explanation), "attention_fwd/cpu/scalar");
  }
  EXPECT_EQ(out.front(), 7.0f);
  const int64_t count = fk_explanation_num_candidates(explanation);
  ASSERT_GT(count, 0);
  bool accepted = false;
  for (int64_t i = 0; i < count; ++i) {
    fk_candidate candidate;
    ASSERT_EQ(fk_explanation_candidate(explanation, i, &candidate, sizeof candidate), FK_OK);
    accepted = accepted || (candidate.accepted == 1 && candidate.modelled_us > 0 &&
                            std::string(candidate.kernel) == "attention_fwd/cpu/scalar");
    EXPECT_EQ(candidate.accepted == 1, std::string(candidate.reason).empty());
  }
  EXPECT_TRUE(accepted);
  fk_candidate candidate;
  EXPECT_EQ(fk_explanation_candidate(explanation, count, &candidate, sizeof candidate), FK_INVALID_ARGUMENT);
  fk_explanation_destroy(explanation);

  fk_kernel_list* list = nullptr;
  ASSERT_EQ(fk_kernel_list_create(&list), FK_OK);
  const auto kernels = fk::kernels();
  ASSERT_EQ(fk_kernel_list_count(list), static_cast<int64_t>(kernels.size()));
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    fk_kernel_info info;
    ASSERT_EQ(fk_kernel_list_get(list, static_cast<int64_t>(i), &info, sizeof info), FK_OK);
    EXPECT_EQ(info.id, kernels[i].id);
    EXPECT_EQ(info.arithmetic, kernels[i].arithmetic);
    EXPECT_EQ(info.cpu_features, kernels[i].cpu_features);
    EXPECT_EQ(info.available == 1, kernels[i].available);
  }
  fk_kernel_list_destroy(list);
}

TEST(CApi, NamesEveryOp) {
  const auto ops = fk::ops();
  for (std::size_t i = 0; i < ops.size(); ++i) EXPECT_EQ(fk_op_name(static_cast<int64_t>(i)), ops[i].name);
  EXPECT_EQ(fk_op_name(static_cast<int64_t>(ops.size())), nullptr);
  EXPECT_EQ(fk_op_name(-1), nullptr);
}

struct Counted {
  std::size_t allocated = 0, live = 0;
  bool empty = false;
};

TEST(CApi, TheCallersAllocatorServesThePoolAndOutlivesItsHandle) {
  Counted counted;
  auto callbacks = fk_memory_callbacks{};
  callbacks.size = sizeof callbacks;
  callbacks.user = &counted;
  callbacks.allocate = [](void* user, size_t bytes, size_t alignment, void*) -> void* {
    auto& state = *static_cast<Counted*>(user);
    if (state.empty) return nullptr;
    state.allocated += bytes, ++state.live;
    return ::operator new(bytes, std::align_val_t(alignment));
  };
  callbacks.deallocate = [](void* user, void* pointer, size_t, size_t alignment, void*) {
    --static_cast<Counted*>(user)->live;
    ::operator delete(pointer, std::align_val_t(alignment));
  };
  fk_memory *memory = nullptr, *cached = nullptr;
  ASSERT_EQ(fk_memory_custom_create(&callbacks, &memory), FK_OK);
  ASSERT_EQ(fk_memory_caching_create(memory, 0, &cached), FK_OK);
  void* pointer = nullptr;
  EXPECT_OK(fk_memory_allocate(cached, 1000, 0, nullptr, &pointer));
  EXPECT_EQ(counted.live, 1u);
  fk_memory_stats stats;
  EXPECT_OK(fk_memory_get_stats(cached, &stats, sizeof stats));
  EXPECT_GE(stats.allocated_bytes, 1000u);
  EXPECT_OK(fk_memory_deallocate(cached, pointer, 1000, 0, nullptr));
  uint64_t trimmed = 0;
  EXPECT_OK(fk_memory_trim(cached, &trimmed));
  EXPECT_GE(trimmed, 1000u);
  EXPECT_EQ(counted.live, 0u);
  EXPECT_EQ(fk_memory_allocate(cached, 8, 3, nullptr, &pointer), FK_INVALID_ARGUMENT);

  auto options = made(fk_kv_page_pool_options_init);
  options.num_pages = 4, options.heads_kv = 1, options.head_dim = 8, options.page_size = 16, options.dtype = FK_FLOAT32;
  fk_kv_page_pool* pool = nullptr;
  fk_kv_cache* cache = nullptr;
  ASSERT_EQ(fk_kv_page_pool_create(&options, cached, &pool), FK_OK) << fk_last_error_message();
  ASSERT_EQ(fk_kv_cache_create(pool, &cache), FK_OK);
  fk_memory_destroy(memory);  // in the wrong order: each handle keeps what it was made from
  fk_memory_destroy(cached);
  fk_kv_page_pool_destroy(pool);
  EXPECT_GT(counted.live, 0u);
  fk_sequence sequence;
  EXPECT_OK(fk_kv_cache_create_sequence(cache, nullptr, 0, &sequence, nullptr));
  int64_t slots[20], length = 0, num_pages = 0;
  EXPECT_OK(fk_kv_cache_append(cache, sequence, 20, nullptr, slots));
  EXPECT_OK(fk_kv_cache_length(cache, sequence, &length));
  EXPECT_EQ(length, 20);
  int32_t pages[2];
  EXPECT_EQ(fk_kv_cache_pages(cache, sequence, 1, pages, &num_pages), FK_INVALID_ARGUMENT);
  EXPECT_EQ(num_pages, 2);
  EXPECT_OK(fk_kv_cache_pages(cache, sequence, 2, pages, &num_pages));
  EXPECT_EQ(slots[19], pages[1] * 16 + 3);
  EXPECT_EQ(fk_kv_cache_append(cache, sequence, 1000, nullptr, std::vector<int64_t>(1000).data()), FK_OUT_OF_PAGES);
  EXPECT_EQ(fk_kv_cache_append(cache, sequence, -1, nullptr, slots), FK_INVALID_ARGUMENT);
  EXPECT_EQ(fk_kv_cache_create_sequence(cache, nullptr, -1, &sequence, nullptr), FK_INVALID_ARGUMENT);
  fk_kv_cache_destroy(cache);
  EXPECT_EQ(counted.live, 0u);

  counted.empty = true;
  ASSERT_EQ(fk_memory_custom_create(&callbacks, &memory), FK_OK);
  EXPECT_EQ(fk_memory_allocate(memory, 5000, 0, nullptr, &pointer), FK_OUT_OF_MEMORY);
  fk_error_details details;
  EXPECT_EQ(fk_last_error_details(&details, sizeof details), FK_OK);
  EXPECT_EQ(details.requested_bytes, 5000u);
  fk_memory_destroy(memory);
  for (auto* destroy : {fk_memory_destroy}) destroy(nullptr);
  fk_kv_cache_destroy(nullptr);
  fk_kv_page_pool_destroy(nullptr);
}

TEST(CApi, SequencesShareAPublishedPrompt) {
  auto options = made(fk_kv_page_pool_options_init);
  options.num_pages = 8, options.heads_kv = 1, options.head_dim = 8, options.page_size = 16;
  fk_kv_page_pool* pool = nullptr;
  fk_kv_cache* cache = nullptr;
  ASSERT_EQ(fk_kv_page_pool_create(&options, nullptr, &pool), FK_OK);
  ASSERT_EQ(fk_kv_cache_create(pool, &cache), FK_OK);
  std::vector<int32_t> tokens(40, 5);
  std::vector<int64_t> slots(40);
  fk_sequence first, second, third;
  int64_t found = -1, dropped = 0, length = 0;
  EXPECT_OK(fk_kv_cache_create_sequence(cache, tokens.data(), 40, &first, &found));
  EXPECT_EQ(found, 0);
  EXPECT_OK(fk_kv_cache_append(cache, first, 40, nullptr, slots.data()));
  EXPECT_OK(fk_kv_cache_publish(cache, first, tokens.data(), 40));
  EXPECT_OK(fk_kv_cache_create_sequence(cache, tokens.data(), 40, &second, &found));
  EXPECT_EQ(found, 32);
  EXPECT_OK(fk_kv_cache_fork(cache, first, &third));
  EXPECT_OK(fk_kv_cache_truncate(cache, third, 20));
  EXPECT_OK(fk_kv_cache_length(cache, third, &length));
  EXPECT_EQ(length, 20);
  EXPECT_OK(fk_kv_cache_drop_before(cache, third, 16, &dropped));
  EXPECT_EQ(dropped, 1);
  fk_kv_cache_stats stats;
  EXPECT_OK(fk_kv_cache_get_stats(cache, &stats, sizeof stats));
  EXPECT_EQ(stats.num_sequences, 3);
  EXPECT_EQ(stats.num_prefix_hits, 2u);
  EXPECT_EQ(stats.num_pages_used + stats.num_pages_free + stats.num_pages_cached, 8);
  for (const fk_sequence sequence : {first, second, third}) EXPECT_OK(fk_kv_cache_free_sequence(cache, sequence));
  EXPECT_EQ(fk_kv_cache_free_sequence(cache, first), FK_INVALID_ARGUMENT);
  EXPECT_OK(fk_kv_cache_drop_cached(cache, &dropped));
  EXPECT_EQ(dropped, 2);
  EXPECT_EQ(fk_kv_page_pool_num_free(pool), 8);
  fk_kv_cache_destroy(cache);
  fk_kv_page_pool_destroy(pool);
}

}  // namespace
}  // namespace flashkernel::c_api_tests
