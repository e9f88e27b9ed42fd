/* Prefills of a bfloat16 pool in the tile unit of an Intel processor (AMX), which multiplies eight times as fast as its vector
   units. For native.c, with its names; there is nothing here where the compiler's machine has no such unit.

   Scores are computed transposed, keys by queries: softmax then goes down vectors of sixteen queries. Weights are rounded to
   bfloat16, all sums are float32. Tiles of keys begin at multiples of KEYS, so that neither the unit of work nor its rows
   change a row's sums. */

#if defined(BFLOAT16) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__linux__)
#define HAS_TILES

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* rows (a query of one head) at once, as many as a vector has lanes; HEAD_DIM as tiles of keys and of values cover it */
enum { SIDE = 16, DEPTH = (HEAD_DIM + 31) / 32 * 32, WIDTH = (HEAD_DIM + 15) / 16 * 16 };

/* Linux lends the unit to processes that ask for it. */
static int tiles_lent(void) {
    static int answer; /* 0: not asked yet */
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    if (!answer) answer = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 1 : -1;
    return answer > 0;
}

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shapes;

static inline void transpose(__m512i *rows) {
    __m512i pairs[SIDE];
    for (int i = 0; i < SIDE; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < SIDE; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i even = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x88);
        const __m512i odd = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xdd);
        const __m512i later_even = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x88);
        const __m512i later_odd = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xdd);
        pairs[i] = _mm512_shuffle_i32x4(even, later_even, 0x88);
        pairs[4 + i] = _mm512_shuffle_i32x4(odd, later_odd, 0x88);
        pairs[8 + i] = _mm512_shuffle_i32x4(even, later_even, 0xdd);
        pairs[12 + i] = _mm512_shuffle_i32x4(odd, later_odd, 0xdd);
    }
    memcpy(rows, pairs, sizeof pairs);
}

/* 2 ** x of numbers that are not above 0, with a relative error of 3e-6; below -126 as there. NaN stays NaN. */
static inline __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);
    const __m512 n = _mm512_roundscale_ps(x, 0), f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.33335581e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.61812911e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55041087e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40226507e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147181e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

static inline __m512i upper_half(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

/* Weights of a tile's `keys`, a multiple of 32: scores [keys, SIDE] to weights [keys / 2, SIDE, 2]. Each of the SIDE rows
   attends to keys [from, to). results [WIDTH, SIDE] are rescaled; sums: of the weights as they are rounded. */
static inline void weigh(
    float *scores, uint32_t *weights, float *results, float *highest, float *sums, __m512i from, __m512i to, int keys,
    float scale, float softcap) {
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    const int all_seen = !_mm512_cmpgt_epi32_mask(from, _mm512_setzero_si512()) &&
                         !_mm512_cmplt_epi32_mask(to, _mm512_set1_epi32(keys));
    if (softcap > 0) {
        for (int i = 0; i < keys * SIDE; i++) scores[i] = softcap * tanhf(scores[i] * scale / softcap);
        scale = 1;
    }
    const __m512 factor = _mm512_set1_ps(scale * 1.44269504f), before = _mm512_loadu_ps(highest);
    __m512 most = before, sum = _mm512_setzero_ps();
    for (int t = 0; t < keys; t++) {
        __m512 score = _mm512_mul_ps(_mm512_load_ps(scores + t * SIDE), factor);
        if (!all_seen) {
            const __m512i key = _mm512_set1_epi32(t);
            const __mmask16 seen = _mm512_cmple_epi32_mask(from, key) & _mm512_cmpgt_epi32_mask(to, key);
            score = _mm512_mask_mov_ps(nothing, seen, score);
        }
        _mm512_store_ps(scores + t * SIDE, score);
        most = _mm512_max_ps(most, score);
    }
    /* A row that has seen no key yet has no highest score to subtract. */
    const __m512 anchor = _mm512_mask_mov_ps(most, _mm512_cmp_ps_mask(most, nothing, _CMP_EQ_OQ), _mm512_setzero_ps());
    for (int t = 0; t < keys; t += 2) {
        __m512i halves[2];
        for (int i = 0; i < 2; i++) {
            const __m512 score = _mm512_load_ps(scores + (t + i) * SIDE);
            __m512 weight = power_of_two(_mm512_sub_ps(score, anchor));
            if (!all_seen) weight = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(score, nothing, _CMP_NEQ_UQ), weight);
            halves[i] = upper_half(weight);
            sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(halves[i], 16)));
        }
        _mm512_store_si512(weights + t / 2 * SIDE, _mm512_or_si512(halves[0], _mm512_slli_epi32(halves[1], 16)));
    }
    const __m512 keep = power_of_two(_mm512_sub_ps(before, anchor));
    _mm512_storeu_ps(highest, most);
    _mm512_storeu_ps(sums, _mm512_fmadd_ps(_mm512_loadu_ps(sums), keep, sum));
    if (_mm512_cmp_ps_mask(keep, _mm512_set1_ps(1), _CMP_NEQ_UQ))
        for (int d = 0; d < WIDTH; d++)
            _mm512_store_ps(results + d * SIDE, _mm512_mul_ps(_mm512_load_ps(results + d * SIDE), keep));
}

/* As attend_unit of native.c. */
static void attend_unit_in_tiles(
    const float *queries, int64_t query_step, const kv_type *keys, float *out, int64_t width, int64_t start, int64_t count,
    const int64_t *table, int64_t kv_heads, int64_t group, int64_t chunk, int64_t window, float scale, float softcap) {
    const int64_t stride = 2 * kv_heads * HEAD_DIM, to_values = kv_heads * HEAD_DIM, rows = count * group;
    const int64_t blocks = (rows + SIDE - 1) / SIDE;
    tile_shapes before, shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = SIDE;
    _tile_storeconfig(&before); /* oneDNN's, which it would not set again */
    _tile_loadconfig(&shapes);

    _Alignas(64) kv_type key_tile[KEYS * DEPTH], value_rows[KEYS * WIDTH], value_tile[WIDTH * KEYS];
    _Alignas(64) float scores[KEYS * SIDE];
    _Alignas(64) uint32_t weights[KEYS / 2 * SIDE];
    __m512i asked[blocks][DEPTH / 2], line[SIDE]; /* queries as pairs of numbers, transposed */
    __m512 results[blocks][WIDTH];
    float highest[blocks * SIDE], sums[blocks * SIDE];
    memset(key_tile, 0, sizeof key_tile);
    memset(value_rows, 0, sizeof value_rows);
    memset(results, 0, sizeof results);
    for (int64_t r = 0; r < blocks * SIDE; r++) highest[r] = -INFINITY, sums[r] = 0;
    for (int64_t block = 0; block < blocks; block++)
        for (int d = 0; d < DEPTH; d += 32) {
            for (int lane = 0; lane < SIDE; lane++) {
                const int64_t row = block * SIDE + lane < rows ? block * SIDE + lane : rows - 1;
                float numbers[32] = {0};
                memcpy(numbers, queries + row / group * query_step + row % group * HEAD_DIM + d,
                       (HEAD_DIM - d < 32 ? HEAD_DIM - d : 32) * sizeof *numbers);
                line[lane] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(numbers + 16), _mm512_loadu_ps(numbers));
            }
            transpose(line);
            memcpy(&asked[block][d / 2], line, sizeof line);
        }

    const int64_t low = window && start >= window ? start - window + 1 : 0, stop = start + count;
    for (int64_t at = low / KEYS * KEYS; at < stop; at += KEYS) {
        const int64_t begin = at < low ? low - at : 0, end = stop - at < KEYS ? stop - at : KEYS;
        for (int64_t t = begin; t < end; t++) {
            const kv_type *key = keys + (table[(at + t) / chunk] * chunk + (at + t) % chunk) * stride;
            memcpy(key_tile + t * DEPTH, key, HEAD_DIM * sizeof *key);
            memcpy(value_rows + t * WIDTH, key + to_values, HEAD_DIM * sizeof *key);
        }
        for (int64_t t = end; t < KEYS; t++) /* of the tile before; its numbers might be NaN */
            memset(value_rows + t * WIDTH, 0, HEAD_DIM * sizeof *value_rows);
        for (int t = 0; t < KEYS; t += 32)
            for (int d = 0; d < WIDTH; d += SIDE) {
                for (int i = 0; i < SIDE; i++) {
                    const kv_type *pair = value_rows + (t + 2 * i) * WIDTH + d;
                    const __m512i one = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)pair));
                    const __m512i other = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(pair + WIDTH)));
                    line[i] = _mm512_or_si512(one, _mm512_slli_epi32(other, 16));
                }
                transpose(line);
                for (int i = 0; i < SIDE; i++) _mm512_store_si512(value_tile + (d + i) * KEYS + t, line[i]);
            }
        for (int64_t block = (at > start ? at - start : 0) * group / SIDE; block < blocks; block++) {
            const int64_t first = block * SIDE, last = first + SIDE < rows ? first + SIDE : rows;
            if (window && start + first / group - window + 1 >= at + KEYS) break;
            const int64_t seen = start + (last - 1) / group + 1 - at; /* keys of the tile that the last row attends to */
            const int wide = seen > 32;
            int32_t from[SIDE], to[SIDE];
            for (int lane = 0; lane < SIDE; lane++) {
                const int64_t position = start + (first + lane < last ? first + lane : last - 1) / group - at;
                to[lane] = position + 1 < KEYS ? position + 1 : KEYS;
                from[lane] = window && position >= window ? position - window + 1 : 0;
            }
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int d = 0; d < DEPTH; d += 32) {
                _tile_loadd(4, &asked[block][d / 2], 64);
#define SCORES_OF(tile)                                                      \
    _tile_loadd(5, key_tile + tile * SIDE * DEPTH + d, DEPTH * sizeof(kv_type)); \
    _tile_dpbf16ps(tile, 5, 4)
                SCORES_OF(0);
                SCORES_OF(1);
                if (wide) {
                    SCORES_OF(2);
                    SCORES_OF(3);
                }
            }
            _tile_stored(0, scores, 64);
            _tile_stored(1, scores + SIDE * SIDE, 64);
            if (wide) {
                _tile_stored(2, scores + 2 * SIDE * SIDE, 64);
                _tile_stored(3, scores + 3 * SIDE * SIDE, 64);
            }
            weigh(scores, weights, (float *)results[block], highest + first, sums + first, _mm512_loadu_si512(from),
                  _mm512_loadu_si512(to), wide ? KEYS : 32, scale, softcap);
            _tile_loadd(4, weights, 64);
            if (wide) _tile_loadd(5, weights + SIDE * SIDE, 64);
            for (int d = 0; d < WIDTH; d += SIDE) {
                _tile_loadd(0, &results[block][d], 64);
                _tile_loadd(6, value_tile + d * KEYS, KEYS * sizeof(kv_type));
                _tile_dpbf16ps(0, 6, 4);
                if (wide) {
                    _tile_loadd(7, value_tile + d * KEYS + 32, KEYS * sizeof(kv_type));
                    _tile_dpbf16ps(0, 7, 5);
                }
                _tile_stored(0, &results[block][d], 64);
            }
        }
    }
    for (int64_t block = 0; block < blocks; block++) {
        const __m512 share = _mm512_div_ps(_mm512_set1_ps(1), _mm512_loadu_ps(sums + block * SIDE));
        for (int d = 0; d < WIDTH; d += SIDE) {
            for (int i = 0; i < SIDE; i++) line[i] = _mm512_castps_si512(_mm512_mul_ps(results[block][d + i], share));
            transpose(line);
            for (int lane = 0; lane < SIDE && block * SIDE + lane < rows; lane++) {
                const int64_t row = block * SIDE + lane;
                memcpy(out + row / group * width + row % group * HEAD_DIM + d, &line[lane],
                       (HEAD_DIM - d < SIDE ? HEAD_DIM - d : SIDE) * sizeof *out);
            }
        }
    }
    _tile_loadconfig(&before);
}
#endif
