/* What a layer does to each row by itself, in one pass over memory where torch takes several: RMS norm and rotation.

   Compiled when it is first needed, for this machine. All float32. Neither other rows nor the number of threads change a
   row's result. */

#include <math.h>
#include <stdint.h>

/* y [rows, size] = x / sqrt(mean(x^2) + eps) * weight [size]. */
void rms_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * size;
        float *to = y + row * size, squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += from[i] * from[i];
        const float scale = 1 / sqrtf(squares / size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = from[i] * scale * weight[i];
    }
}

/* The first `heads` heads of each row, in place: x * cos + (x with its halves exchanged) * sin. x [rows, stride]; cos,
   sin [rows, size], sin negative in its first half. */
void rotate(
    float *x, const float *cosines, const float *sines, int64_t rows, int64_t stride, int64_t heads, int64_t size,
    int threads) {
    const int64_t half = size / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cosines + row * size, *s = sines + row * size;
        for (int64_t head = 0; head < heads; head++) {
            float *first = x + row * stride + head * size, *second = first + half;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float one = first[i], other = second[i];
                first[i] = one * c[i] + other * s[i];
                second[i] = other * c[half + i] + one * s[half + i];
            }
        }
    }
}
