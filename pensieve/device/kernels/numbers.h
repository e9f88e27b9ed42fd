/* The type of stored numbers (-DFLOAT32, -DBFLOAT16 or -DFLOAT16), and an exponential that compilers make vectors of. */

#include <math.h>
#include <stdint.h>

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

/* Relative error below 2e-7; arguments beyond -87 and 88 give what those give. NaN stays NaN. */
static inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
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
