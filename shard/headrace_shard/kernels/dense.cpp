// The C interface of what surrounds attention: products with weights, norms, rotations.
//
// Knows number formats and how work is shared among threads. Strides are in elements; the last dimension is
// always contiguous. Nothing here checks its arguments: the caller in Python does.
#include "dense.h"
#include "elementwise.h"
#include "interface.h"

namespace headrace {

// Numbers below which waking threads costs more than computing.
constexpr int64_t kMinShared = 1 << 15;

// Calls work(first, last) with parts of 0 .. num_rows.
template <class Work>
void share(int64_t num_rows, int64_t row_size, int num_threads, Work work) {
    int64_t num_parts = num_rows * row_size < kMinShared ? 1 : std::min<int64_t>(num_threads, num_rows);
#pragma omp parallel for num_threads(num_threads) schedule(static, 1) if (num_parts > 1)
    for (int64_t part = 0; part < num_parts; ++part)
        work(num_rows * part / num_parts, num_rows * (part + 1) / num_parts);
}

template <class Storage>
void normalise_shared(const void* x, int64_t x_stride, const void* weight, void* y, int64_t num_rows,
                      int64_t size, float epsilon, int num_threads) {
    using Element = typename Storage::Element;
    share(num_rows, size, num_threads, [&](int64_t first, int64_t last) {
        normalise<Storage>((const Element*)x + first * x_stride, x_stride, (const Element*)weight,
                           (Element*)y + first * size, last - first, size, epsilon);
    });
}

template <class Storage>
void rotate_shared(void* heads, int64_t token_stride, int64_t num_tokens, int num_heads, int head_dim,
                   const float* cos, const float* sin, int num_threads) {
    using Element = typename Storage::Element;
    share(num_tokens, num_heads * head_dim, num_threads, [&](int64_t first, int64_t last) {
        rotate<Storage>((Element*)heads + first * token_stride, token_stride, last - first, num_heads,
                        head_dim, cos + first * head_dim, sin + first * head_dim);
    });
}

}  // namespace headrace

extern "C" {

int headrace_panel_columns() { return headrace::kPanelColumns; }

int headrace_numbers_per_word(int format) {
    using namespace headrace;
    return static_cast<Format>(format) == Format::bfloat16 ? BFloat16Operands::kPerWord : 1;
}

void headrace_multiply(
    int format, const void* x, int64_t x_stride, const void* weight, const void* bias, const void* addend,
    void* y, int64_t num_rows, int64_t depth, int64_t num_results, int is_gated, int num_threads) {
    using namespace headrace;
    Product call{x,     x_stride,    weight,        bias,       addend, y, num_rows,
                 depth, num_results, is_gated != 0, num_threads};
    switch (static_cast<Format>(format)) {
        case Format::float32: return WeightProduct<WideOperands<Float32>>(call).run();
        case Format::bfloat16: return WeightProduct<BFloat16Operands>(call).run();
        case Format::float16: return WeightProduct<WideOperands<Float16>>(call).run();
    }
}

void headrace_normalise(int format, const void* x, int64_t x_stride,
                                                               const void* weight, void* y, int64_t num_rows,
                                                               int64_t size, float epsilon, int num_threads) {
    using namespace headrace;
    switch (static_cast<Format>(format)) {
        case Format::float32:
            return normalise_shared<Float32>(x, x_stride, weight, y, num_rows, size, epsilon, num_threads);
        case Format::bfloat16:
            return normalise_shared<BFloat16>(x, x_stride, weight, y, num_rows, size, epsilon, num_threads);
        case Format::float16:
            return normalise_shared<Float16>(x, x_stride, weight, y, num_rows, size, epsilon, num_threads);
    }
}

void headrace_rotate(int format, void* heads, int64_t token_stride,
                                                            int64_t num_tokens, int num_heads, int head_dim,
                                                            const float* cos, const float* sin,
                                                            int num_threads) {
    using namespace headrace;
    switch (static_cast<Format>(format)) {
        case Format::float32:
            return rotate_shared<Float32>(heads, token_stride, num_tokens, num_heads, head_dim, cos, sin,
                                          num_threads);
        case Format::bfloat16:
            return rotate_shared<BFloat16>(heads, token_stride, num_tokens, num_heads, head_dim, cos, sin,
                                           num_threads);
        case Format::float16:
            return rotate_shared<Float16>(heads, token_stride, num_tokens, num_heads, head_dim, cos, sin,
                                          num_threads);
    }
}

}  // extern "C"
