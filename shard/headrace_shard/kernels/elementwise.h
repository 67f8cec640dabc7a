// Norms and rotations, row by row: each number is read once, computed in float32 and rounded once.
//
// Knows number formats; knows nothing of layers. A row's result depends on that row alone.
#pragma once

#include <cmath>

#include "formats.h"

namespace headrace {

// x / rms(x) * weight (Zhang and Sennrich 2019). x and y are [num_rows, size].
template <class Storage>
void normalise(const typename Storage::Element* x, int64_t x_stride, const typename Storage::Element* weight,
               typename Storage::Element* y, int64_t num_rows, int64_t size, float epsilon) {
    int64_t whole = size / kWidth * kWidth;
    int left = (int)(size - whole);
    for (int64_t row = 0; row < num_rows; ++row, x += x_stride, y += size) {
        Floats squares[4] = {};
        int64_t i = 0;
        for (; i + 4 * kWidth <= whole; i += 4 * kWidth)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                Floats numbers = Storage::load(x + i + j * kWidth);
                squares[j] += numbers * numbers;
            }
        for (; i < size; i += kWidth) {
            Floats numbers = load_some<Storage>(x + i, i < whole ? kWidth : left);
            squares[0] += numbers * numbers;
        }
        float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)size;
        float factor = 1.0f / std::sqrt(mean + epsilon);
        for (i = 0; i < size; i += kWidth) {
            int count = i < whole ? kWidth : left;
            Floats numbers = load_some<Storage>(x + i, count) * factor;
            store_some<Storage>(y + i, numbers * load_some<Storage>(weight + i, count), count);
        }
    }
}

// Turns heads in place (Su et al. 2021): number i with number i + head_dim / 2. cos and sin are [num_tokens,
// head_dim]; sin's first half is negated already, so its second half holds the plain sines.
template <class Storage>
void rotate(typename Storage::Element* heads, int64_t token_stride, int64_t num_tokens, int num_heads,
            int head_dim, const float* cos, const float* sin) {
    int half = head_dim / 2;
    for (int64_t token = 0; token < num_tokens; ++token, cos += head_dim, sin += head_dim)
        for (int head = 0; head < num_heads; ++head) {
            typename Storage::Element* low = heads + token * token_stride + head * head_dim;
            typename Storage::Element* high = low + half;
            for (int i = 0; i < half; i += kWidth) {
                int count = half - i < kWidth ? half - i : kWidth;
                Floats cosines = load_some<Float32>(cos + i, count);
                Floats sines = load_some<Float32>(sin + half + i, count);
                Floats lower = load_some<Storage>(low + i, count);
                Floats higher = load_some<Storage>(high + i, count);
                store_some<Storage>(low + i, lower * cosines - higher * sines, count);
                store_some<Storage>(high + i, higher * cosines + lower * sines, count);
            }
        }
}

}  // namespace headrace
