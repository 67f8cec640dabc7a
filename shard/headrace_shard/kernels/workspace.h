// Memory for what a call computes on its way. Knows sizes only.
#pragma once

#include <cstdint>
#include <new>
#include <utility>

namespace headrace {

// Memory that a thread keeps between calls, grown to the most it was asked for: fresh memory would be cleared
// page by page each time.
class Workspace {
   public:
    Workspace() = default;
    Workspace(const Workspace&) = delete;
    ~Workspace() { release(); }

    // Sizes in bytes of every part; each part starts on a cache line.
    template <class... Part>
    void divide(std::pair<Part*&, int64_t>... parts) {
        int64_t total = (aligned(parts.second) + ...);
        if (total > num_bytes_) {
            release();
            memory_ = static_cast<char*>(::operator new(total, std::align_val_t{64}));
            num_bytes_ = total;
        }
        char* next = memory_;
        ((parts.first = reinterpret_cast<Part*>(next), next += aligned(parts.second)), ...);
    }

   private:
    static int64_t aligned(int64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }
    void release() {
        if (memory_) ::operator delete(memory_, std::align_val_t{64});
        memory_ = nullptr;
        num_bytes_ = 0;
    }

    char* memory_ = nullptr;
    int64_t num_bytes_ = 0;
};

}  // namespace headrace
