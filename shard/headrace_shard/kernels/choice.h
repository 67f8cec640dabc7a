// Which products a number format is multiplied with on this machine.
#pragma once

#include "amx.h"
#include "products.h"

namespace headrace {

// Calls body with the products of a format that are best on this machine.
template <class Body>
void with_products(Format format, Body body) {
    switch (format) {
        case Format::float32: return body(FloatProducts<Float32>{});
        case Format::bfloat16:
#if defined(HEADRACE_AMX)
            if (has_matrix_registers()) return body(MatrixProducts{});
#endif
            return body(BFloat16Products{});
        case Format::float16: return body(FloatProducts<Float16>{});
    }
}

// What the products of bfloat16 are made with.
inline const char* instructions() {
#if defined(HEADRACE_AMX)
    if (has_matrix_registers()) return "AMX-BF16";
#endif
    return kInstructions;
}

}  // namespace headrace
