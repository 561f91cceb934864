/* Attention over a paged KV-cache from C: a prompt of 40 tokens, a fork of it, one more token for each of the two
 * sequences, and the attention of one query a sequence, checked against attention written out by hand.
 *
 *   cc -std=c99 paged_attention.c $(pkg-config --cflags --libs flashkernel) -lm && ./a.out
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "flashkernel/flashkernel.h"

enum { HEADS_Q = 4, HEADS_KV = 2, HEAD_DIM = 32, PROMPT = 40, PAGE_SIZE = 16, MAX_TOKENS = PROMPT + 1, MAX_PAGES = 3 };
enum { TOKEN = HEADS_KV * HEAD_DIM }; /* floats of a token's keys, and of its values */

static const fk_device cpu = {FK_CPU, 0};

/* Ends the program with the library's own sentence. */
static void check(fk_status status, const char *call) {
  if (status == FK_OK) return;
  fprintf(stderr, "%s: %s: %s\n", call, fk_status_name(status), fk_last_error_message());
  exit(1);
}
#define CHECK(call) check(call, #call)

static float random_value(void) {
  static unsigned state = 1;
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 8) / 8388608.0f - 1.0f;
}

static fk_tensor tensor(void *data, fk_dtype dtype, int ndim, const int64_t *shape) {
  fk_tensor made;
  CHECK(fk_tensor_init(&made, data, dtype, cpu, ndim, shape));
  return made;
}

/* Appends `count` tokens to a sequence: the cache says where they go, fk_kv_append writes them there. */
static void append(fk_kv_page_pool *pool, fk_kv_cache *cache, fk_sequence sequence, int64_t count, float *keys,
                   float *values) {
  int64_t slots[PROMPT];
  const int64_t shape[] = {count, HEADS_KV, HEAD_DIM};
  const fk_tensor k = tensor(keys, FK_FLOAT32, 3, shape), v = tensor(values, FK_FLOAT32, 3, shape);
  const fk_tensor slots_tensor = tensor(slots, FK_INT64, 1, &count);
  fk_tensor k_pages, v_pages;
  CHECK(fk_kv_page_pool_k_pages(pool, 0, &k_pages));
  CHECK(fk_kv_page_pool_v_pages(pool, 0, &v_pages));
  CHECK(fk_kv_cache_append(cache, sequence, count, NULL, slots));
  CHECK(fk_kv_append(&k, &v, &k_pages, &v_pages, NULL, &slots_tensor, NULL, NULL));
}

/* softmax(q k^T / sqrt(d)) v of one head. */
static void attention_by_hand(const float *q, const float *keys, const float *values, int kv_head, double *out) {
  double scores[MAX_TOKENS], most = -INFINITY, sum = 0;
  int t, d;
  for (t = 0; t < MAX_TOKENS; ++t) {
    scores[t] = 0;
    for (d = 0; d < HEAD_DIM; ++d) scores[t] += (double)q[d] * keys[t * TOKEN + kv_head * HEAD_DIM + d];
    scores[t] /= sqrt(HEAD_DIM);
    if (scores[t] > most) most = scores[t];
  }
  for (d = 0; d < HEAD_DIM; ++d) out[d] = 0;
  for (t = 0; t < MAX_TOKENS; ++t) {
    const double weight = exp(scores[t] - most);
    sum += weight;
    for (d = 0; d < HEAD_DIM; ++d) out[d] += weight * values[t * TOKEN + kv_head * HEAD_DIM + d];
  }
  for (d = 0; d < HEAD_DIM; ++d) out[d] /= sum;
}

int main(void) {
  static float keys[2][MAX_TOKENS * TOKEN], values[2][MAX_TOKENS * TOKEN];
  float q[2 * HEADS_Q * HEAD_DIM], out[2 * HEADS_Q * HEAD_DIM];
  int32_t table[2 * MAX_PAGES], lengths[2];
  fk_kv_page_pool_options options;
  fk_kv_page_pool *pool;
  fk_kv_cache *cache;
  fk_sequence sequences[2];
  double largest = 0;
  int64_t free_pages;
  int i, b, h, d;

  for (i = 0; i < MAX_TOKENS * TOKEN; ++i) { /* the two share a prompt and differ in their last token */
    keys[0][i] = random_value();
    values[0][i] = random_value();
    keys[1][i] = i < PROMPT * TOKEN ? keys[0][i] : random_value();
    values[1][i] = i < PROMPT * TOKEN ? values[0][i] : random_value();
  }
  for (i = 0; i < 2 * HEADS_Q * HEAD_DIM; ++i) q[i] = random_value();

  CHECK(fk_kv_page_pool_options_init(&options, sizeof options));
  options.num_pages = 8;
  options.page_size = PAGE_SIZE;
  options.heads_kv = HEADS_KV;
  options.head_dim = HEAD_DIM;
  options.dtype = FK_FLOAT32;
  CHECK(fk_kv_page_pool_create(&options, NULL, &pool));
  CHECK(fk_kv_cache_create(pool, &cache));
  CHECK(fk_kv_cache_create_sequence(cache, NULL, 0, &sequences[0], NULL));
  append(pool, cache, sequences[0], PROMPT, keys[0], values[0]);
  CHECK(fk_kv_cache_fork(cache, sequences[0], &sequences[1])); /* shares the prompt's pages until one of them writes */
  for (b = 0; b < 2; ++b) append(pool, cache, sequences[b], 1, keys[b] + PROMPT * TOKEN, values[b] + PROMPT * TOKEN);
  CHECK(fk_kv_cache_block_table(cache, sequences, 2, MAX_PAGES, table, lengths));

  {
    const int64_t q_shape[] = {2, HEADS_Q, 1, HEAD_DIM}, table_shape[] = {2, MAX_PAGES}, lengths_shape[] = {2};
    const fk_tensor q_tensor = tensor(q, FK_FLOAT32, 4, q_shape), out_tensor = tensor(out, FK_FLOAT32, 4, q_shape);
    const fk_tensor table_tensor = tensor(table, FK_INT32, 2, table_shape);
    const fk_tensor lengths_tensor = tensor(lengths, FK_INT32, 1, lengths_shape);
    fk_tensor k_pages, v_pages;
    CHECK(fk_kv_page_pool_k_pages(pool, 0, &k_pages));
    CHECK(fk_kv_page_pool_v_pages(pool, 0, &v_pages));
    CHECK(fk_attention_paged(&q_tensor, &k_pages, &v_pages, &table_tensor, &lengths_tensor, NULL, 1, &out_tensor, NULL,
                             NULL, NULL));
  }

  for (b = 0; b < 2; ++b)
    for (h = 0; h < HEADS_Q; ++h) {
      const int row = (b * HEADS_Q + h) * HEAD_DIM;
      double expected[HEAD_DIM];
      attention_by_hand(q + row, keys[b], values[b], h * HEADS_KV / HEADS_Q, expected);
      for (d = 0; d < HEAD_DIM; ++d)
        if (!(fabs(expected[d] - out[row + d]) <= largest)) largest = fabs(expected[d] - out[row + d]);
    }
  for (b = 0; b < 2; ++b) CHECK(fk_kv_cache_free_sequence(cache, sequences[b]));
  free_pages = fk_kv_page_pool_num_free(pool);
  fk_kv_cache_destroy(cache);
  fk_kv_page_pool_destroy(pool);
  printf("flashkernel %s: largest difference to attention in double precision: %.1e\n", fk_version(), largest);
  return largest <= 1e-5 && free_pages == 8 ? 0 : 1;
}
