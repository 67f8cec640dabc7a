// Threads that go through a computation side by side and wait for one another between its parts.
//
// Knows threads and how they wait; knows nothing of what they compute. A decoder block has some ten parts of
// tens of microseconds: to begin and end a parallel region for each, and to sleep and be woken at its end, takes
// longer than some of them. So a team is made once for the whole computation.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

// How long one who waits looks out for the others before it sleeps. Shorter than it takes to be woken would be
// to sleep too early; much longer would keep the router and the clients off a core that they need.
constexpr std::chrono::microseconds kWatch{50};

// Numbers below which one thread alone is done before two have shared the work, and before one more is woken.
constexpr int64_t kMinShared = 1 << 12;
constexpr int64_t kMinWoken = 1 << 15;

class Team {
   public:
    // Calls body(member) on `num_threads` threads, or as many as there are to be had.
    template <class Body>
    static void run(int num_threads, Body body);

    // One thread's place in its team. Everything here is called by all members alike, in the same order.
    class Member {
       public:
        int size() const { return size_; }

        // work(first, last) for parts of 0 .. num_units, of `grain` units at most, by whoever is free; returns
        // when all is done.
        template <class Work>
        void share(int64_t num_units, int64_t grain, Work work) {
            if (size_ == 1) {
                if (num_units > 0) work(0, num_units);
                return;
            }
            for (int64_t first; (first = team_.next_.fetch_add(grain, std::memory_order_relaxed)) < num_units;)
                work(first, std::min(first + grain, num_units));
            team_.meet(size_);
        }

        // As `share`, in parts small enough that nobody has long to wait for the last one.
        template <class Work>
        void share(int64_t num_units, Work work) {
            constexpr int kPartsEach = 16;
            share(num_units, std::max<int64_t>(1, num_units / (kPartsEach * size_)), work);
        }

        // As `share`, unit by unit, but everybody has a stretch of their own and helps the others when it is done: so
        // it is mostly known what comes next. work(unit, next); `next` is `unit` when nobody knows.
        template <class Work>
        void share_stretches(int64_t num_units, Work work) {
            if (size_ == 1) {
                for (int64_t unit = 0; unit < num_units; ++unit) work(unit, std::min(unit + 1, num_units - 1));
                return;
            }
            for (int i = 0; i < size_; ++i) {
                int owner = (number_ + i) % size_;
                bool is_own = i == 0;
                int64_t begin = num_units * owner / size_, count = num_units * (owner + 1) / size_ - begin;
                Claims claims;
                while (team_.claim(owner, is_own, count, claims)) {
                    int64_t unit = begin + (is_own ? claims.front() : count - 1 - claims.back());
                    bool is_last = claims.front() + claims.back() + 1 == count;
                    work(unit, is_last ? unit : is_own ? unit + 1 : unit - 1);
                }
            }
            team_.meet(size_);
        }

        // work() by one thread, while the others wait.
        template <class Work>
        void once(Work work) {
            share(1, 1, [&](int64_t, int64_t) { work(); });
        }

        // As `share` for units of so many numbers each, but by one thread when there is little to do.
        template <class Work>
        void share_numbers(int64_t num_units, int64_t unit_size, Work work) {
            if (num_units * unit_size >= kMinShared)
                share(num_units, work);
            else
                share(num_units, std::max<int64_t>(1, num_units), work);
        }

       private:
        friend class Team;
        Member(Team& team, int size, int number) : team_(team), size_(size), number_(number) {}
        Team& team_;
        const int size_;
        const int number_;
    };

   private:
    explicit Team(int size) : stretches_(size) {}

    // How much of a stretch is claimed, from its front by its owner and from its back by others, in this round: what
    // is left from an earlier one counts as nothing, so nobody has to clear it in time.
    struct Claims {
        static constexpr int kBits = 24;  // of each number; the rest is of the round
        static constexpr uint64_t kMask = (1 << kBits) - 1;
        uint64_t bits = 0;
        int64_t front() const { return bits >> kBits & kMask; }
        int64_t back() const { return bits & kMask; }
    };

    struct alignas(64) Stretch {
        std::atomic<uint64_t> bits{0};
    };

    // Claims one unit of a stretch of `count`. False if there is none; otherwise `claims` is as it was before.
    bool claim(int owner, bool is_front, int64_t count, Claims& claims) {
        std::atomic<uint64_t>& bits = stretches_[owner].bits;
        uint64_t round = (uint64_t)round_.load(std::memory_order_relaxed) << 2 * Claims::kBits;
        uint64_t found = bits.load(std::memory_order_relaxed);
        do {
            claims.bits = found >> 2 * Claims::kBits == round >> 2 * Claims::kBits ? found : round;
            if (claims.front() + claims.back() >= count) return false;
        } while (!bits.compare_exchange_weak(
            found, claims.bits + (is_front ? uint64_t{1} << Claims::kBits : 1), std::memory_order_relaxed));
        return true;
    }

    // Returns when `size` threads have come. (A barrier that reverses its sense: Mellor-Crummey and Scott 1991.)
    void meet(int size) {
        uint32_t round = round_.load(std::memory_order_relaxed);
        if (num_here_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            num_here_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            round_.fetch_add(1);
            if (num_asleep_.load() > 0) wake();
            return;
        }
        auto until = std::chrono::steady_clock::now() + kWatch;
        do {
            for (int look = 0; look < 64; ++look) {
                if (round_.load(std::memory_order_acquire) != round) return;
#if defined(__x86_64__)
                _mm_pause();
#endif
            }
        } while (std::chrono::steady_clock::now() < until);
        num_asleep_.fetch_add(1);
        while (round_.load() == round) sleep(round);
        num_asleep_.fetch_sub(1);
    }

#if defined(__linux__)
    void sleep(uint32_t round) { syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { std::this_thread::yield(); }
    void wake() {}
#endif

    static_assert(sizeof(std::atomic<uint32_t>) == 4, "the system call reads the number itself");
    alignas(64) std::atomic<int64_t> next_{0};  // the unit that nobody has begun yet
    std::vector<Stretch> stretches_;     // one for each member
    alignas(64) std::atomic<uint32_t> round_{0};
    std::atomic<int> num_here_{0};
    std::atomic<int> num_asleep_{0};
};

template <class Body>
void Team::run(int num_threads, Body body) {
    Team team(std::max(num_threads, 1));
    if (num_threads <= 1) {
        Member member(team, 1, 0);
        return body(member);
    }
#pragma omp parallel num_threads(num_threads)
    {
        Member member(team, omp_get_num_threads(), omp_get_thread_num());
        body(member);
    }
}

}  // namespace headrace
