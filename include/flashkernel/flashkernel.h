// The C API of FlashKernel: C99 and C++, one header, nothing but a C compiler needed. docs/c_api.md is the guide.
//
// A function that can fail returns an fk_status; fk_last_error_message says the rest. No C++ exception leaves the
// library. Results are written through the last pointers, and only on FK_OK. What may be NULL says so. Every function
// may be called from any thread; a handle may be used by several threads at once, but not while one of them destroys
// it. Within one SONAME functions and fields are only added.
#pragma once

#include "flashkernel/flashkernel_ops.h"
#include "flashkernel/flashkernel_types.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- Version and errors

// The version of the C API that this header describes. It changes only together with the SONAME.
enum { FK_ABI_VERSION = 1 };
FK_API int32_t fk_abi_version(void);

// "0.1.0"; lives as long as the process.
FK_API const char* fk_version(void);

// "FK_INVALID_ARGUMENT"; for a number that is no status: "unknown status".
FK_API const char* fk_status_name(fk_status status);

// One sentence about the last call of this thread that failed: "op: what was given; what is needed". Valid until this
// thread's next failure; "" before the first one.
FK_API const char* fk_last_error_message(void);

// The numbers of the last failure of this thread. Those that do not belong to its status are 0.
typedef struct fk_error_details {
  size_t size;
  fk_status status;
  int32_t cuda_code;         // FK_CUDA_ERROR: a cudaError_t
  int64_t sequence;          // FK_BAD_BLOCK_TABLE: row of the page table
  int64_t slot;              // its entry; -1: the length of the sequence is bad
  int64_t page;              // what stands there
  uint64_t requested_bytes;  // FK_OUT_OF_MEMORY and FK_OUT_OF_PAGES
  uint64_t free_bytes;       // what could still have been served; 0 if that is not known
  uint64_t peak_bytes;       // most bytes ever in use at once
  uint64_t requested_pages;  // FK_OUT_OF_PAGES
  uint64_t free_pages;
  uint64_t num_pages;
} fk_error_details;
// `size` is sizeof(*details). FK_INVALID_ARGUMENT: NULL or a wrong size; the last error stays as it was.
FK_API fk_status fk_last_error_details(fk_error_details* details, size_t size);

// ---- Devices and threads

// CUDA devices that this build can use: 0 without CUDA, without a driver or without a GPU.
FK_API int32_t fk_num_cuda_devices(void);
// Threads that CPU kernels use, the caller's included. Starts as OMP_NUM_THREADS, else the cores of this process.
FK_API int32_t fk_num_threads(void);
// Takes effect at the next op. FK_INVALID_ARGUMENT: count < 1.
FK_API fk_status fk_set_num_threads(int32_t count);
// Processor features that kernels may use: "avx2 avx512". Valid until this thread calls the function again.
FK_API const char* fk_cpu_features(void);

// ---- Kernels

// Functions that are ops ("attention_varlen"; the C function is fk_attention_varlen), by index; NULL past the last one.
FK_API const char* fk_op_name(int64_t index);

typedef struct fk_kernel_info {
  size_t size;
  const char* id;            // "attention_fwd/cpu/avx512"; strings live as long as the list
  const char* op;            // "attention_fwd"
  const char* cpu_features;  // needed; "" if none
  const char* arithmetic;    // kernels of one op with the same name here give the same bits for the same call
  fk_device_type device;
  int32_t cc_min;  // compute capabilities served: 75 is 7.5; 0 on the CPU
  int32_t cc_max;
  int32_t available;  // 1: this machine can run it
  uint64_t calls;     // launches since the process started
} fk_kernel_info;
// Every kernel of this build, as of now.
FK_API fk_status fk_kernel_list_create(fk_kernel_list** list);
FK_API void fk_kernel_list_destroy(fk_kernel_list* list);
FK_API int64_t fk_kernel_list_count(const fk_kernel_list* list);  // 0 for NULL
// `size` is sizeof(*info). FK_INVALID_ARGUMENT: NULL, a wrong size, an index outside of 0 .. count - 1.
FK_API fk_status fk_kernel_list_get(const fk_kernel_list* list, int64_t index, fk_kernel_info* info, size_t size);

// Restricts the choice, process-wide: "attention_fwd/cpu/scalar", a prefix of it, "*/cpu/scalar" for every op; several
// separated by commas; "" frees it. A "?" at the end prefers instead of restricting. The environment variable
// FLASHKERNEL_FORCE is the start. FK_INVALID_ARGUMENT: a pattern that matches no kernel.
FK_API fk_status fk_force_kernels(const char* patterns);
// The patterns in force. Valid until this thread calls the function again; NULL where FLASHKERNEL_FORCE is wrong.
FK_API const char* fk_forced_kernels(void);

// What an op would do. Put the handle into fk_context.explain: the call then checks its arguments and chooses, and
// writes nothing. One handle serves one call at a time; each call writes it anew.
FK_API fk_status fk_explanation_create(fk_explanation** explanation);
FK_API void fk_explanation_destroy(fk_explanation* explanation);
// The kernel that would run; "" if none. Valid until the handle is used again. NULL for NULL.
FK_API const char* fk_explanation_kernel(const fk_explanation* explanation);
FK_API uint64_t fk_explanation_workspace_bytes(const fk_explanation* explanation);
FK_API int64_t fk_explanation_num_candidates(const fk_explanation* explanation);
typedef struct fk_candidate {
  size_t size;
  const char* kernel;  // strings live until the handle is used again
  const char* reason;  // why it refuses; "" where it accepts
  int32_t accepted;    // 0 or 1
  float modelled_us;   // microseconds by the model that the choice follows, no measurement; 0 where it refuses
} fk_candidate;
FK_API fk_status fk_explanation_candidate(const fk_explanation* explanation, int64_t index, fk_candidate* candidate,
                                          size_t size);

// ---- Memory

typedef struct fk_memory_stats {
  size_t size;
  uint64_t allocated_bytes;  // in use by callers now
  uint64_t reserved_bytes;   // taken from upstream now (in use and cached)
  uint64_t peak_allocated_bytes;
  uint64_t peak_reserved_bytes;
  uint64_t num_allocations;  // calls that succeeded
  uint64_t num_deallocations;
  uint64_t num_upstream_allocations;
  uint64_t num_invalid_frees;  // pointers given back that were not in use; each was ignored
} fk_memory_stats;

// An allocator of the caller's. Both functions may be called from any thread, and must not unwind (longjmp,
// exceptions).
typedef struct fk_memory_callbacks {
  size_t size;
  void* user;        // handed to both functions
  fk_device device;  // where its memory lies
  // Memory that work on `stream` may use at once; NULL when there is none. `alignment` is a power of two.
  void* (*allocate)(void* user, size_t bytes, size_t alignment, void* stream);
  // Takes it back once the work queued on `stream` so far has run.
  void (*deallocate)(void* user, void* pointer, size_t bytes, size_t alignment, void* stream);
} fk_memory_callbacks;

// The library's own memory of a device: a cache that lives as long as the process. FK_UNSUPPORTED: no such device.
FK_API fk_status fk_memory_default_create(fk_device device, fk_memory** memory);
// The host's aligned allocator; limit_bytes 0: no limit.
FK_API fk_status fk_memory_host_create(uint64_t limit_bytes, fk_memory** memory);
// A cache over other memory; limit_bytes bounds what it reserves (0: no limit).
FK_API fk_status fk_memory_caching_create(fk_memory* upstream, uint64_t limit_bytes, fk_memory** memory);
// The struct is copied; `user` has to outlive the handle and all that was made from it.
FK_API fk_status fk_memory_custom_create(const fk_memory_callbacks* callbacks, fk_memory** memory);
FK_API void fk_memory_destroy(fk_memory* memory);
// Stream-ordered. alignment: a power of two, or 0 for the default of 256. FK_OUT_OF_MEMORY changes nothing.
FK_API fk_status fk_memory_allocate(fk_memory* memory, size_t bytes, size_t alignment, void* stream, void** pointer);
// `bytes` and `alignment` as they were asked for; a NULL pointer does nothing.
FK_API fk_status fk_memory_deallocate(fk_memory* memory, void* pointer, size_t bytes, size_t alignment, void* stream);
FK_API fk_status fk_memory_get_stats(const fk_memory* memory, fk_memory_stats* stats, size_t size);
// Gives unused memory back to where it came from; *bytes (may be NULL) gets how much.
FK_API fk_status fk_memory_trim(fk_memory* memory, uint64_t* bytes);

// ---- Pages of keys and values

typedef struct fk_kv_page_pool_options {
  size_t size;
  int64_t num_pages;
  int64_t heads_kv;
  int64_t head_dim;
  int64_t head_dim_v;  // 0: head_dim
  int64_t page_size;   // tokens: 16, 32, 64, 128 or 256 (the default)
  int64_t num_layers;  // one page id covers the same tokens in every layer; default 1
  fk_dtype dtype;      // float32, float16 (the default), bfloat16, float8_e4m3, int8 or int4x2
  int32_t
      token_scales;  // 8-bit pages: 1 (the default): the pool has a scale a token and head; 0: the caller has scales
  fk_device device;
} fk_kv_page_pool_options;
FK_API fk_status fk_kv_page_pool_options_init(fk_kv_page_pool_options* options, size_t size);

// Storage comes from `memory` (NULL: the device's default) and is not initialised. FK_OUT_OF_MEMORY changes nothing.
FK_API fk_status fk_kv_page_pool_create(const fk_kv_page_pool_options* options, fk_memory* memory,
                                        fk_kv_page_pool** pool);
FK_API void fk_kv_page_pool_destroy(fk_kv_page_pool* pool);
// Bytes of one page: keys and values of all layers, and their scales; 0 for NULL, as the two below.
FK_API uint64_t fk_kv_page_pool_page_bytes(const fk_kv_page_pool* pool);
FK_API int64_t fk_kv_page_pool_num_free(const fk_kv_page_pool* pool);
FK_API int64_t fk_kv_page_pool_num_used(const fk_kv_page_pool* pool);
// Takes `count` pages or none (FK_OUT_OF_PAGES); `pages` has room for them. Each has one reference.
FK_API fk_status fk_kv_page_pool_take(fk_kv_page_pool* pool, int64_t count, int32_t* pages);
// One more reference to each page, one less; all or none. FK_INVALID_ARGUMENT: a page that is not taken.
FK_API fk_status fk_kv_page_pool_retain(fk_kv_page_pool* pool, int64_t count, const int32_t* pages);
FK_API fk_status fk_kv_page_pool_give_back(fk_kv_page_pool* pool, int64_t count, const int32_t* pages);
// *count gets 0 for a free page.
FK_API fk_status fk_kv_page_pool_num_references(const fk_kv_page_pool* pool, int32_t page, int32_t* count);
// Views of one layer: [num_pages, page_size, heads_kv, head_dim] and [..., head_dim_v].
FK_API fk_status fk_kv_page_pool_k_pages(const fk_kv_page_pool* pool, int64_t layer, fk_tensor* k_pages);
FK_API fk_status fk_kv_page_pool_v_pages(const fk_kv_page_pool* pool, int64_t layer, fk_tensor* v_pages);
// Views of the scales of one layer, float32 [num_pages, heads_kv, page_size]. FK_INVALID_ARGUMENT: the pool has none.
FK_API fk_status fk_kv_page_pool_scales(const fk_kv_page_pool* pool, int64_t layer, fk_tensor* k, fk_tensor* v);

// ---- Sequences of a KV-cache

// A sequence of one cache. One that was freed, or is another cache's, is recognised (FK_INVALID_ARGUMENT). All zero:
// none.
typedef struct fk_sequence {
  uint32_t slot;
  uint32_t generation;
  uint64_t cache;
} fk_sequence;

typedef struct fk_kv_cache_stats {
  size_t size;
  int64_t num_sequences;
  int64_t num_pages_used;    // distinct pages held by sequences
  int64_t num_pages_shared;  // those held by two sequences or more
  int64_t num_pages_cached;  // held by the prefix index only; given up when the pool runs dry
  int64_t num_pages_free;
  uint64_t num_prefix_hits;
  uint64_t num_copies_on_write;
  uint64_t num_evictions;
} fk_kv_cache_stats;

// Bookkeeping is on the host; keys and values are moved by fk_kv_append and read by fk_attention_paged. A call that
// fails leaves sequences, lengths and pages as they were.
FK_API fk_status fk_kv_cache_create(fk_kv_page_pool* pool, fk_kv_cache** cache);
FK_API void fk_kv_cache_destroy(fk_kv_cache* cache);
// A sequence for these tokens that already holds the longest run of full pages that fk_kv_cache_publish has seen under
// exactly these tokens (never all of them). NULL and 0 tokens: an empty one. *num_cached (may be NULL): its length.
FK_API fk_status fk_kv_cache_create_sequence(fk_kv_cache* cache, const int32_t* tokens, int64_t num_tokens,
                                             fk_sequence* sequence, int64_t* num_cached);
// Offers the full pages of a sequence, whose first tokens are `tokens`, to later sequences.
FK_API fk_status fk_kv_cache_publish(fk_kv_cache* cache, fk_sequence sequence, const int32_t* tokens,
                                     int64_t num_tokens);
// A second sequence that shares every page; whoever appends to a shared, partly filled page gets a copy of it first.
FK_API fk_status fk_kv_cache_fork(fk_kv_cache* cache, fk_sequence sequence, fk_sequence* fork);
// Forgets the tokens from `length` on.
FK_API fk_status fk_kv_cache_truncate(fk_kv_cache* cache, fk_sequence sequence, int64_t length);
// Gives back the pages that hold only tokens before `position`; *num_pages (may be NULL) gets how many.
FK_API fk_status fk_kv_cache_drop_before(fk_kv_cache* cache, fk_sequence sequence, int64_t position,
                                         int64_t* num_pages);
FK_API fk_status fk_kv_cache_free_sequence(fk_kv_cache* cache, fk_sequence sequence);
// Room for `num_tokens` more tokens: their slots (page * page_size + offset) go to `slots`, int64 [num_tokens] on the
// host. Copies the rows in use of a shared last page, queued on `stream`.
FK_API fk_status fk_kv_cache_append(fk_kv_cache* cache, fk_sequence sequence, int64_t num_tokens, void* stream,
                                    int64_t* slots);
// Tokens of a sequence, and ceil(tokens / page_size).
FK_API fk_status fk_kv_cache_length(const fk_kv_cache* cache, fk_sequence sequence, int64_t* length);
FK_API fk_status fk_kv_cache_num_pages(const fk_kv_cache* cache, fk_sequence sequence, int64_t* num_pages);
// The page of every block, -1 for those given back; *num_pages gets how many there are. FK_INVALID_ARGUMENT where
// `capacity` is smaller: *num_pages is written then too.
FK_API fk_status fk_kv_cache_pages(const fk_kv_cache* cache, fk_sequence sequence, int64_t capacity, int32_t* pages,
                                   int64_t* num_pages);
// int32 [count, max_pages] (unused entries -1) and int32 [count], on the host. FK_INVALID_ARGUMENT, and nothing is
// written, where max_pages is less than the largest number of pages.
FK_API fk_status fk_kv_cache_block_table(const fk_kv_cache* cache, const fk_sequence* sequences, int64_t count,
                                         int64_t max_pages, int32_t* table, int32_t* lengths);
// Empties the prefix index of what no sequence holds; *num_pages (may be NULL): pages that became free.
FK_API fk_status fk_kv_cache_drop_cached(fk_kv_cache* cache, int64_t* num_pages);
FK_API fk_status fk_kv_cache_get_stats(const fk_kv_cache* cache, fk_kv_cache_stats* stats, size_t size);

#ifdef __cplusplus
}
#endif
