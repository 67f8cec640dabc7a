// Products with weights, norms and rotations in the model's format, for a team and for Python.
#include "choice.h"
#include "computations.h"
#include "dense.h"
#include "elementwise.h"
#include "interface.h"

namespace headrace {

void multiply(Team::Member& member, Format format, const Product& call) {
    with_products(format, [&](auto products) { WeightProduct<decltype(products)>(call).run(member); });
}

template <class Storage>
void normalise_shared(Team::Member& member, const Norm& call) {
    using Element = typename Storage::Element;
    member.share_numbers(call.num_rows, call.size, [&](int64_t first, int64_t last) {
        normalise<Storage>((const Element*)call.x + first * call.x_stride, call.x_stride,
                           (const Element*)call.weight, (Element*)call.y + first * call.size, last - first,
                           call.size, call.epsilon);
    });
}

void normalise(Team::Member& member, Format format, const Norm& call) {
    switch (format) {
        case Format::float32: return normalise_shared<Float32>(member, call);
        case Format::bfloat16: return normalise_shared<BFloat16>(member, call);
        case Format::float16: return normalise_shared<Float16>(member, call);
    }
}

template <class Storage>
void rotate_shared(Team::Member& member, const Turn& call) {
    using Element = typename Storage::Element;
    member.share_numbers(call.num_tokens, call.num_heads * call.head_dim, [&](int64_t first, int64_t last) {
        rotate<Storage>((Element*)call.heads + first * call.token_stride, call.token_stride, last - first,
                        call.num_heads, call.head_dim, call.cos + first * call.head_dim,
                        call.sin + first * call.head_dim);
    });
}

void rotate(Team::Member& member, Format format, const Turn& call) {
    switch (format) {
        case Format::float32: return rotate_shared<Float32>(member, call);
        case Format::bfloat16: return rotate_shared<BFloat16>(member, call);
        case Format::float16: return rotate_shared<Float16>(member, call);
    }
}

}  // namespace headrace

using namespace headrace;

int headrace_panel_columns(int format) {
    int num_columns = 0;
    with_products(static_cast<Format>(format), [&](auto products) {
        num_columns = Multiplier<decltype(products)>::kPanelColumns;
    });
    return num_columns;
}

int headrace_matrix_columns(int format) {
    int num_columns = 0;
    with_products(static_cast<Format>(format), [&](auto products) {
        num_columns = Multiplier<decltype(products)>::kMatrixColumns;
    });
    return num_columns;
}

int headrace_matrix_words(int format, int64_t depth) {
    int num_words = 0;
    with_products(static_cast<Format>(format), [&](auto products) {
        num_words = Multiplier<decltype(products)>::matrix_words(depth);
    });
    return num_words;
}

int headrace_numbers_per_word(int format) {
    return static_cast<Format>(format) == Format::bfloat16 ? BFloat16Products::kPerWord : 1;
}

void headrace_multiply(
    int format, const void* x, int64_t x_stride, const void* weight, const void* bias, const void* addend,
    void* y, int64_t num_rows, int64_t depth, int64_t num_results, int is_gated, int num_threads) {
    Product call{x, x_stride, weight, bias, addend, y, num_rows, depth, num_results, is_gated != 0};
    Team::run(num_threads, [&](Team::Member& member) { multiply(member, static_cast<Format>(format), call); });
}

void headrace_normalise(
    int format, const void* x, int64_t x_stride, const void* weight, void* y, int64_t num_rows, int64_t size,
    float epsilon, int num_threads) {
    Norm call{x, x_stride, weight, y, num_rows, size, epsilon};
    if (num_rows * size < kMinWoken) num_threads = 1;
    Team::run(num_threads, [&](Team::Member& member) { normalise(member, static_cast<Format>(format), call); });
}

void headrace_rotate(
    int format, void* heads, int64_t token_stride, int64_t num_tokens, int num_heads, int head_dim,
    const float* cos, const float* sin, int num_threads) {
    Turn call{heads, token_stride, num_tokens, num_heads, head_dim, cos, sin};
    if (num_tokens * num_heads * head_dim < kMinWoken) num_threads = 1;
    Team::run(num_threads, [&](Team::Member& member) { rotate(member, static_cast<Format>(format), call); });
}
