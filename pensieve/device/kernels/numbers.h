/* The type of stored numbers (-DFLOAT32, -DBFLOAT16 or -DFLOAT16), vectors of float32, and an exponential that compilers make
   vectors of. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float floats __attribute__((vector_size(LANES * 4)));

#if defined(BFLOAT16)
typedef uint16_t number; /* the upper half of a float32 */
typedef union {
    uint32_t bits;
    float value;
} wide_number;
static inline float widened(number half) {
    wide_number wide = {(uint32_t)half << 16};
    return wide.value;
}
/* To the nearest, and of two to the even one. */
static inline number narrowed(float value) {
    wide_number wide = {.value = value};
    return value != value ? 0x7fc0 : (wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16;
}
#else
#if defined(FLOAT16)
typedef _Float16 number;
#else
typedef float number;
#endif
static inline float widened(number value) { return (float)value; }
static inline number narrowed(float value) { return (number)value; }
#endif

/* Relative error below 2e-7; arguments beyond -87 and 87 give what those give. NaN stays NaN. The bound is set on the bits: of
   a comparison of floats compilers make a constant for each side, and what is computed with those for numbers that lie
   between is subnormal, which takes an Intel processor 150 cycles. */
static inline float exp_of(float x) {
    union {
        float value;
        int32_t bits;
    } bounded = {x};
    const int32_t sign = bounded.bits & INT32_MIN, size = bounded.bits & INT32_MAX, most = 0x42ae0000; /* 87 */
    bounded.bits = sign | (size < most ? size : most);
    const float within = bounded.value, n = floorf(within * 1.44269504f + 0.5f);
    const float r = (within - n * 0.693359375f) + n * 2.12194440e-4f; /* n ln 2 in two parts */
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
    return x != x ? x : p * power.value;
}
