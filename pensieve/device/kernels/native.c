/* Attention of single queries straight over the blocks of a pool on a CPU: decode rows (section 4.4).

   Compiled when it is first needed, for this machine, one head size (-DHEAD_DIM=...) and one type of the pool (-DKV_FLOAT32,
   -DKV_BFLOAT16 or -DKV_FLOAT16). Queries, results and all sums are float32: a tile of a 16-bit pool is widened first. A row's keys and values are
   read once, in the order in which they lie, for all heads: softmax is kept up as in FlashAttention (a running maximum,
   a running sum, and results that are rescaled when the maximum grows). What comes next is asked for ahead of time,
   since no prefetcher follows from block to block. Neither other rows nor the number of threads change a row's result. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(KV_BFLOAT16)
typedef uint16_t kv_type;
static inline float widened(kv_type value) {
    union {
        uint32_t bits;
        float value;
    } wide = {(uint32_t)value << 16}; /* bfloat16 is the upper half of a float32 */
    return wide.value;
}
#elif defined(KV_FLOAT16)
typedef _Float16 kv_type;
static inline float widened(kv_type value) { return (float)value; }
#else
typedef float kv_type;
#endif

/* tokens at once; queries of a KV head at once; numbers of the pool a cache line */
enum { TILE = 16, GROUP = 8, LINE = 64 / sizeof(kv_type) };

/* Relative error below 2e-7; arguments below -87 give what that gives. NaN stays NaN. */
static inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* x - n ln 2, ln 2 in two parts */
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    union {
        int32_t bits;
        float value;
    } power = {((int32_t)n + 127) * (1 << 23)}; /* 2 ** n */
    return p * power.value;
}

static inline void fetch(const kv_type *next) {
    for (int d = 0; d < HEAD_DIM; d += LINE) __builtin_prefetch(next + d, 0, 2); /* to the second level */
}

/* One KV head and its queries over `count` tokens: keys and values `step` numbers apart, the next tile's likewise. */
static inline __attribute__((always_inline)) void attend_tile(
    const kv_type *pool_keys, const kv_type *pool_values, const kv_type *next_keys, const kv_type *next_values,
    int64_t count, int64_t step, int group, const float *queries, float *out, float *highest, float *sums, float scale,
    float softcap) {
    float scores[GROUP][TILE];
#if defined(KV_BFLOAT16) || defined(KV_FLOAT16)
    float keys[TILE * HEAD_DIM], values[TILE * HEAD_DIM];
    const int64_t stride = HEAD_DIM;
    for (int64_t t = 0; t < count; t++) {
#pragma omp simd
        for (int d = 0; d < HEAD_DIM; d++) keys[t * HEAD_DIM + d] = widened(pool_keys[t * step + d]);
#pragma omp simd
        for (int d = 0; d < HEAD_DIM; d++) values[t * HEAD_DIM + d] = widened(pool_values[t * step + d]);
    }
#else
    const float *keys = pool_keys, *values = pool_values;
    const int64_t stride = step;
#endif
    for (int64_t t = 0; t < count; t++) {
        const float *key = keys + t * stride;
        if (next_keys) fetch(next_keys + t * step);
        for (int g = 0; g < group; g++) {
            const float *query = queries + g * HEAD_DIM;
            float score = 0;
#pragma omp simd reduction(+ : score)
            for (int d = 0; d < HEAD_DIM; d++) score += query[d] * key[d];
            score *= scale;
            scores[g][t] = softcap > 0 ? softcap * tanhf(score / softcap) : score;
        }
    }
    for (int g = 0; g < group; g++) {
        float *row = scores[g], *result = out + g * HEAD_DIM, most = highest[g], sum = 0, kept[HEAD_DIM];
        for (int64_t t = count; t < TILE; t++) row[t] = -INFINITY;
#pragma omp simd reduction(max : most)
        for (int t = 0; t < TILE; t++) most = row[t] > most ? row[t] : most;
        float keep = exp_of(highest[g] - most);
#pragma omp simd reduction(+ : sum)
        for (int t = 0; t < TILE; t++) sum += row[t] = exp_of(row[t] - most);
        highest[g] = most;
        sums[g] = sums[g] * keep + sum;
#pragma omp simd
        for (int d = 0; d < HEAD_DIM; d++) kept[d] = result[d] * keep;
        for (int64_t t = 0; t < count; t++) {
            const float *value = values + t * stride, weight = row[t];
            if (next_values && g == 0) fetch(next_values + t * step);
#pragma omp simd
            for (int d = 0; d < HEAD_DIM; d++) kept[d] += weight * value[d];
        }
#pragma omp simd
        for (int d = 0; d < HEAD_DIM; d++) result[d] = kept[d];
    }
}

/* Positions [low, stop) of a row for KV heads [first, last). table: blocks of the row's chunks. */
static void attend_row(
    const float *queries, const kv_type *pool, float *out, int64_t low, int64_t stop, const int64_t *table, int first,
    int last, int kv_heads, int group, int64_t chunk, float scale, float softcap) {
    const int64_t stride = 2 * (int64_t)kv_heads * HEAD_DIM, to_values = (int64_t)kv_heads * HEAD_DIM;
    float highest[(last - first) * group], sums[(last - first) * group];
    for (int h = 0; h < (last - first) * group; h++) highest[h] = -INFINITY, sums[h] = 0;
    for (int64_t i = first * group * HEAD_DIM; i < last * group * HEAD_DIM; i++) out[i] = 0;
    for (int64_t at = low, count; at < stop; at += count) {
        count = chunk - at % chunk;
        count = count > TILE ? TILE : count;
        count = count > stop - at ? stop - at : count;
        const kv_type *here = pool + (table[at / chunk] * chunk + at % chunk) * stride, *next = 0;
        const int64_t then = at + count;
        if (then < stop) next = pool + (table[then / chunk] * chunk + then % chunk) * stride;
        for (int head = first; head < last; head++) {
            const kv_type *keys = here + head * HEAD_DIM, *next_keys = next ? next + head * HEAD_DIM : 0;
            for (int done = 0; done < group; done += GROUP) {
                const int query = head * group + done, own = query - first * group, left = group - done;
                if (done > 0) next_keys = 0; /* asked for already */
#define TILE_OF(size)                                                                                            \
    attend_tile(keys, keys + to_values, next_keys, next_keys ? next_keys + to_values : 0, count, stride, size,    \
                queries + query * HEAD_DIM, out + query * HEAD_DIM, highest + own, sums + own, scale, softcap)
                switch (left) { /* the usual ones are unrolled */
                case 1: TILE_OF(1); break;
                case 2: TILE_OF(2); break;
                case 4: TILE_OF(4); break;
                default: TILE_OF(left < GROUP ? left : GROUP);
                }
            }
        }
    }
    for (int h = first * group; h < last * group; h++) {
        const float share = 1 / sums[h - first * group];
        for (int d = 0; d < HEAD_DIM; d++) out[h * HEAD_DIM + d] *= share;
    }
}

/* queries, out [rows, kv_heads * group, HEAD_DIM]; pool [tokens, 2, kv_heads, HEAD_DIM]; row r attends to positions
   [lows[r], stops[r]), whose blocks of `chunk` tokens are table[starts[r] ...]. softcap 0: none. */
void attend_decode(
    const float *queries, const kv_type *pool, float *out, const int64_t *lows, const int64_t *stops,
    const int64_t *starts, const int64_t *table, int64_t rows, int kv_heads, int group, int64_t chunk, float scale,
    float softcap, int threads) {
    /* Heads of a row lie side by side in memory: they are parted only where rows are fewer than threads. */
    int parts = 1;
    while (rows * parts < threads && parts < kv_heads) parts++;
    const int64_t width = (int64_t)kv_heads * group * HEAD_DIM;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
    for (int64_t unit = 0; unit < rows * parts; unit++) {
        const int64_t row = unit / parts, part = unit % parts;
        attend_row(queries + row * width, pool, out + row * width, lows[row], stops[row], table + starts[row],
                   part * kv_heads / parts, (part + 1) * kv_heads / parts, kv_heads, group, chunk, scale, softcap);
    }
}

/* Keys and values of `count` tokens, `key_step` and `value_step` numbers apart, to their places in a pool [tokens, 2, width].
   Returns how many were written: the next one's place is none of the pool's. */
int64_t write_tokens(
    kv_type *pool, int64_t tokens, const int64_t *places, const kv_type *keys, const kv_type *values, int64_t count,
    int64_t key_step, int64_t value_step, int64_t width) {
    for (int64_t token = 0; token < count; token++) {
        if (places[token] < 0 || places[token] >= tokens) return token;
        kv_type *to = pool + places[token] * 2 * width;
        memcpy(to, keys + token * key_step, width * sizeof *to);
        memcpy(to + width, values + token * value_step, width * sizeof *to);
    }
    return count;
}
