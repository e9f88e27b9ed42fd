/* What a decode step does faster in C than in torch, to rows by themselves: products of few rows, which take as long as the
   weights take to read; RMS norm, rotation, and the gate of an MLP, in one pass over memory where torch takes several.

   Compiled when it is first needed, for this machine and one type of numbers. Sums are float32, and results are rounded once:
   a product differs from that with the same weights in float32 by the order of its sums alone. Neither other rows nor the
   number of threads change a row's result. */

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "../kernels/numbers.h"

/* Outputs and rows that are summed at once, as many as there are registers for: 16 sums of 32 with AVX-512, 12 of 16 with AVX
   and SSE. */
enum { OUTPUTS = LANES == 16 ? 4 : 3, ROWS = 4 };

static inline floats widened_lanes(const number *from) {
    floats all;
#if defined(FLOAT32)
    memcpy(&all, from, sizeof all);
#elif defined(BFLOAT16) && defined(__AVX512F__)
    all = (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif defined(BFLOAT16) && defined(__AVX2__)
    all = (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    for (int i = 0; i < LANES; i++) all[i] = widened(from[i]);
#endif
    return all;
}

enum { AHEAD = 16384, LINE = 64 }; /* bytes: weights are asked for so early, since prefetchers stop at the ends of pages */

/* a * b + c, rounded once wherever the machine can: a compiler that may choose does so for some numbers of rows and not for
   others. */
static inline floats added(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline float added_one(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

static inline float sum_of(floats lanes) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

/* y for `outputs` weights and `rows` inputs, both constant where this is inlined. */
static inline __attribute__((always_inline)) void tile(
    int rows, int outputs, const float *x, const number *weights, const float *bias, float *y, int64_t in,
    int64_t out) {
    floats sums[ROWS * OUTPUTS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * outputs; i++) sums[i] = (floats){0};
    int64_t at = 0;
    for (; at + LANES <= in; at += LANES) {
        floats inputs[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) memcpy(&inputs[r], x + r * in + at, sizeof inputs[r]);
#pragma GCC unroll 4
        for (int o = 0; o < outputs; o++) {
            const floats weight = widened_lanes(weights + o * in + at);
            if (at * sizeof(number) % LINE == 0)
                __builtin_prefetch((const char *)(weights + o * in + at) + AHEAD, 0, 2);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                floats *sum = &sums[r * outputs + o];
                *sum = added(inputs[r], weight, *sum);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int o = 0; o < outputs; o++) {
            float sum = sum_of(sums[r * outputs + o]);
            for (int64_t i = at; i < in; i++) sum = added_one(x[r * in + i], widened(weights[o * in + i]), sum);
            y[r * out + o] = sum + (bias ? bias[o] : 0);
        }
}

#define TILES_OF(count)                                                                                           \
    for (int64_t o = first; o < last; o += OUTPUTS)                                                               \
        if (o + OUTPUTS <= last)                                                                                  \
            tile(count, OUTPUTS, x, weights + o * in, bias ? bias + o : 0, y + o, in, out);                       \
        else                                                                                                      \
            for (int64_t one = o; one < last; one++)                                                              \
                tile(count, 1, x, weights + one * in, bias ? bias + one : 0, y + one, in, out);

/* y [rows, out] = x [rows, in] times weights [out, in]; bias [out] or NULL; at most ROWS rows. */
void linear_few(
    const float *x, const number *weights, const float *bias, float *y, int64_t rows, int64_t in, int64_t out,
    int threads) {
    /* Outputs at once, whose weights are read once for all rows: they fit the second level. */
    const int64_t block = 16 * OUTPUTS;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t first = 0; first < out; first += block) {
        const int64_t last = first + block < out ? first + block : out;
        switch (rows) { /* constants, so that the sums stay in registers */
        case 1: TILES_OF(1) break;
        case 2: TILES_OF(2) break;
        case 3: TILES_OF(3) break;
        default: TILES_OF(4)
        }
    }
}

/* y [rows, size] = x / sqrt(mean(x^2) + eps) * weight [size]. */
void rms_norm(const number *x, const float *weight, number *y, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const number *from = x + row * size;
        number *to = y + row * size;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += widened(from[i]) * widened(from[i]);
        const float scale = 1 / sqrtf(squares / size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = narrowed(widened(from[i]) * scale * weight[i]);
    }
}

/* The first `heads` heads of each row, in place: x * cos + (x with its halves exchanged) * sin. x [rows, stride]; cos,
   sin [rows, size], sin negative in its first half. */
void rotate(
    number *x, const number *cosines, const number *sines, int64_t rows, int64_t stride, int64_t heads, int64_t size,
    int threads) {
    const int64_t half = size / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const number *c = cosines + row * size, *s = sines + row * size;
        for (int64_t head = 0; head < heads; head++) {
            number *first = x + row * stride + head * size, *second = first + half;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float one = widened(first[i]), other = widened(second[i]);
                first[i] = narrowed(one * widened(c[i]) + other * widened(s[i]));
                second[i] = narrowed(other * widened(c[half + i]) + one * widened(s[half + i]));
            }
        }
    }
}

/* y [rows, size] = silu(first half of x [rows, 2 * size]) * the other half. */
void gate(const number *x, number *y, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const number *gates = x + row * 2 * size, *up = gates + size;
        number *to = y + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            const float by = widened(gates[i]);
            to[i] = narrowed(by / (1 + exp_of(-by)) * widened(up[i]));
        }
    }
}
