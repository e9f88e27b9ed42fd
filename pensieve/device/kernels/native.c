/* Attention straight over the blocks of a pool on a CPU (section 4.4): decode rows, and prefills.

   Compiled when it is first needed, for this machine, one head size (-DHEAD_DIM=...) and one type of the pool (-DFLOAT32,
   -DBFLOAT16 or -DFLOAT16). Queries, results and all sums are float32: a tile of a 16-bit pool is widened first, or
   multiplied as it is where the processor has a unit for that (tiles.h). A row's keys and values are
   read once, in the order in which they lie, for all heads: softmax is kept up as in FlashAttention (a running maximum,
   a running sum, and results that are rescaled when the maximum grows). What comes next is asked for ahead of time,
   since no prefetcher follows from block to block. Neither other rows nor the number of threads change a row's result. */

#include "numbers.h"

typedef number kv_type;

/* tokens at once; queries of a KV head at once; numbers of the pool a cache line */
enum { TILE = 16, GROUP = 8, LINE = 64 / sizeof(kv_type) };

static inline void fetch(const kv_type *next) {
    for (int d = 0; d < HEAD_DIM; d += LINE) __builtin_prefetch(next + d, 0, 2); /* to the second level */
}

/* One KV head and its queries over `count` tokens: keys and values `step` numbers apart, the next tile's likewise. */
static inline __attribute__((always_inline)) void attend_tile(
    const kv_type *pool_keys, const kv_type *pool_values, const kv_type *next_keys, const kv_type *next_values,
    int64_t count, int64_t step, int group, const float *queries, float *out, float *highest, float *sums, float scale,
    float softcap) {
    float scores[GROUP][TILE];
#if defined(BFLOAT16) || defined(FLOAT16)
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

/* Prefill: rows (a query of one head) and keys that are multiplied at once. Sums of ROWS times ACROSS vectors stay in
   registers: 24 of 32 with AVX-512, 12 of 16 with AVX. */
enum { ACROSS = LANES == 16 ? 4 : 2 };
enum { ROWS = 6, KEYS = 64, PADDED = (HEAD_DIM + LANES - 1) / LANES * LANES, ROWS_OF_A_UNIT = 384 };

/* c [ROWS, across vectors] = or += a [ROWS, depth] times b [depth, across vectors]. */
static inline __attribute__((always_inline)) void product(
    const float *const *a, int64_t depth, const float *b, int64_t b_step, float *c, int64_t c_step, int across, int add) {
    floats sums[ROWS * ACROSS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < across; v++) {
            if (add) memcpy(&sums[r * across + v], c + r * c_step + v * LANES, sizeof(floats));
            else sums[r * across + v] = (floats){0};
        }
    for (int64_t k = 0; k < depth; k++) {
        floats row[ACROSS];
#pragma GCC unroll 4
        for (int v = 0; v < across; v++) memcpy(&row[v], b + k * b_step + v * LANES, sizeof(floats));
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < across; v++) sums[r * across + v] += a[r][k] * row[v];
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < across; v++) memcpy(c + r * c_step + v * LANES, &sums[r * across + v], sizeof(floats));
}

static void products(
    const float *const *a, int64_t depth, const float *b, int64_t b_step, float *c, int64_t c_step, int width, int add) {
    int at = 0;
    for (; at + ACROSS * LANES <= width; at += ACROSS * LANES)
        product(a, depth, b + at, b_step, c + at, c_step, ACROSS, add);
    for (; at < width; at += LANES) product(a, depth, b + at, b_step, c + at, c_step, 1, add);
}

/* Softmax of a row of scores as far as it attends to them, [low, stop) of KEYS; the others get 0. Returns what earlier results
   are multiplied by. */
static inline float softmax_row(
    float *row, int64_t low, int64_t stop, float scale, float softcap, float *highest, float *sum_of) {
    float most = *highest, sum = 0;
    if (stop <= low) {
        memset(row, 0, KEYS * sizeof *row);
        return 1;
    }
    if (softcap > 0)
        for (int64_t t = low; t < stop; t++) row[t] = softcap * tanhf(row[t] * scale / softcap);
    else
#pragma omp simd
        for (int t = 0; t < KEYS; t++) row[t] *= scale;
    for (int64_t t = 0; t < low; t++) row[t] = -INFINITY;
    for (int64_t t = stop; t < KEYS; t++) row[t] = -INFINITY;
#pragma omp simd reduction(max : most)
    for (int t = 0; t < KEYS; t++) most = row[t] > most ? row[t] : most;
#pragma omp simd reduction(+ : sum)
    for (int t = 0; t < KEYS; t++) sum += row[t] = row[t] == -INFINITY ? 0 : exp_of(row[t] - most);
    const float keep = exp_of(*highest - most);
    *highest = most;
    *sum_of = *sum_of * keep + sum;
    return keep;
}

typedef void attend_some(
    const float *queries, int64_t query_step, const kv_type *keys, float *out, int64_t width, int64_t start, int64_t count,
    const int64_t *table, int64_t kv_heads, int64_t group, int64_t chunk, int64_t window, float scale, float softcap);

/* Queries [0, count) of one KV head's group, at positions from `start` on. queries: query_step numbers from one to the next;
   out: width. Tiles of keys end at multiples of KEYS, so that neither the unit nor its rows change a row's sums. */
static void attend_unit(
    const float *queries, int64_t query_step, const kv_type *keys, float *out, int64_t width, int64_t start, int64_t count,
    const int64_t *table, int64_t kv_heads, int64_t group, int64_t chunk, int64_t window, float scale, float softcap) {
    const int64_t stride = 2 * kv_heads * HEAD_DIM, to_values = kv_heads * HEAD_DIM, rows = count * group;
    float key_tile[HEAD_DIM * KEYS], value_tile[KEYS * PADDED], scores[ROWS * KEYS], results[ROWS * PADDED];
    float highest[rows], sums[rows];
    for (int64_t r = 0; r < rows; r++) {
        highest[r] = -INFINITY, sums[r] = 0;
        memset(out + r / group * width + r % group * HEAD_DIM, 0, HEAD_DIM * sizeof *out);
    }
    memset(key_tile, 0, sizeof key_tile);
    memset(value_tile, 0, sizeof value_tile);
    memset(results, 0, sizeof results);
    const int64_t low = window && start >= window ? start - window + 1 : 0, stop = start + count;
    for (int64_t at = low, next; at < stop; at = next) {
        next = (at / KEYS + 1) * KEYS;
        next = next < stop ? next : stop;
        for (int64_t t = 0; t < next - at; t++) {
            const kv_type *key = keys + (table[(at + t) / chunk] * chunk + (at + t) % chunk) * stride, *value = key + to_values;
            for (int d = 0; d < HEAD_DIM; d++) key_tile[d * KEYS + t] = widened(key[d]);
#pragma omp simd
            for (int d = 0; d < HEAD_DIM; d++) value_tile[t * PADDED + d] = widened(value[d]);
        }
        /* The first rows that see any of these keys, and all rows after them up to those that see none any more. */
        for (int64_t first = (at > start ? at - start : 0) * group; first < rows; first += ROWS) {
            const int64_t last = first + ROWS < rows ? first + ROWS : rows, seen = start + (last - 1) / group + 1;
            if (window && start + first / group - window + 1 >= next) break;
            const int64_t deep = (seen < next ? seen : next) - at;
            const float *a[ROWS], *weights[ROWS];
            for (int r = 0; r < ROWS; r++) {
                const int64_t row = first + r < last ? first + r : last - 1;
                a[r] = queries + row / group * query_step + row % group * HEAD_DIM;
                weights[r] = scores + r * KEYS;
            }
            products(a, HEAD_DIM, key_tile, KEYS, scores, KEYS, (deep + LANES - 1) / LANES * LANES, 0);
            for (int64_t row = first; row < last; row++) {
                const int64_t position = start + row / group, from = window ? position - window + 1 - at : 0;
                const int64_t to = position + 1 < next ? position + 1 - at : next - at;
                float *result = results + (row - first) * PADDED;
                const float *earlier = out + row / group * width + row % group * HEAD_DIM;
                const float keep = softmax_row(scores + (row - first) * KEYS, from > 0 ? from : 0, to, scale, softcap,
                                               highest + row, sums + row);
#pragma omp simd
                for (int d = 0; d < HEAD_DIM; d++) result[d] = earlier[d] * keep;
            }
            products(weights, deep, value_tile, PADDED, results, PADDED, PADDED, 1);
            for (int64_t row = first; row < last; row++)
                memcpy(out + row / group * width + row % group * HEAD_DIM, results + (row - first) * PADDED,
                       HEAD_DIM * sizeof *out);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        float *result = out + r / group * width + r % group * HEAD_DIM, share = 1 / sums[r];
        for (int d = 0; d < HEAD_DIM; d++) result[d] *= share;
    }
}

#include "tiles.h"

/* Spans of several queries: queries [firsts[s], firsts[s] + stops[s] - starts[s]) are positions [starts[s], stops[s]), whose
   blocks are table[tables[s] ...]. queries [tokens, heads, HEAD_DIM], query_step numbers from one token to the next; out
   [tokens, heads, HEAD_DIM]. window 0, softcap 0: none. */
void attend_prefill(
    const float *queries, int64_t query_step, const kv_type *pool, float *out, const int64_t *firsts,
    const int64_t *starts, const int64_t *stops, const int64_t *tables, const int64_t *table, int64_t spans, int kv_heads,
    int group, int64_t chunk, int64_t window, float scale, float softcap, int threads) {
    const int64_t width = (int64_t)kv_heads * group * HEAD_DIM;
    const int64_t most = group < ROWS_OF_A_UNIT ? ROWS_OF_A_UNIT / group : 1; /* queries of a unit */
#ifdef HAS_TILES
    attend_some *const attend = tiles_lent() ? attend_unit_in_tiles : attend_unit;
#else
    attend_some *const attend = attend_unit;
#endif
    for (int64_t s = 0; s < spans; s++) {
        const int64_t queries_here = stops[s] - starts[s], units = (queries_here + most - 1) / most * kv_heads;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
        for (int64_t unit = units - 1; unit >= 0; unit--) { /* the longest first */
            const int64_t head = unit % kv_heads, done = unit / kv_heads * most, left = queries_here - done;
            attend(queries + (firsts[s] + done) * query_step + head * group * HEAD_DIM, query_step, pool + head * HEAD_DIM,
                   out + (firsts[s] + done) * width + head * group * HEAD_DIM, width, starts[s] + done,
                   left < most ? left : most, table + tables[s], kv_heads, group, chunk, window, scale, softcap);
        }
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
