/* What a layer does to each row by itself, in one pass over memory where torch takes several: RMS norm, rotation, and the gate
   of an MLP.

   Compiled when it is first needed, for this machine and one type of numbers. All sums are float32, and results are rounded
   once. Neither other rows nor the number of threads change a row's result. */

#include "../kernels/numbers.h"

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
