/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a CUDA kernel on a CPU: each thread of a block is a fiber on a stack of its own, and blocks
 * follow each other. What makes a kernel wrong on a GPU is told, not lived through: a barrier that
 * not all threads reach, a shuffle that names a lane which has left or stands elsewhere, shared
 * memory beyond what the launch has, and, since fibers and blocks run in an order that the seed
 * decides, most missing barriers. Shared memory is NaN when a block begins. Speed is not modelled.
 */
#pragma once
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__    __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __restrict__

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct uint3 {
    unsigned x, y, z;
};
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}

template <typename To, typename From> inline To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}
inline float __uint_as_float(unsigned bits) {
    return bits_as<float>(bits);
}
inline float __int_as_float(int bits) {
    return bits_as<float>(bits);
}
inline unsigned __float_as_uint(float value) {
    return bits_as<unsigned>(value);
}
inline int __float_as_int(float value) {
    return bits_as<int>(value);
}
inline int __clz(int value) {
    return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
inline int __ffs(int value) {
    return __builtin_ffs(value);
}
inline int __popc(unsigned value) {
    return __builtin_popcount(value);
}
template <typename T> inline T min(T a, T b) {
    return b < a ? b : a;
}
template <typename T> inline T max(T a, T b) {
    return a < b ? b : a;
}

namespace simt {

constexpr int WARP = 32;
constexpr std::size_t STACK = 256 << 10;
constexpr std::size_t MOST_SHARED = 228 << 10;

enum class State { READY, AT_BARRIER, AT_WARP, DONE };

struct Fiber {
    jmp_buf place;
    ucontext_t first;
    bool begun = false;
    State state = State::READY;
    uint3 index{};
    int barrier = 0, needed = 0; /* threads, 0 for all of the block */
    unsigned mask = 0;           /* of the lanes that a warp's operation names */
    int kind = 0;                /* of that operation */
    unsigned turn = 0;           /* parity says which of two places its value has */
    bool vote = false;
};

struct Block {
    std::vector<Fiber> fibers;
    std::unique_ptr<char[]> stacks;
    uint3 index{}, threads{}, grid{};
    jmp_buf scheduler;
    Fiber *current = nullptr;
    alignas(64) unsigned char exchange[2][1024][32]; /* by parity, thread and byte */
    bool any_vote = false;
    unsigned random = 1;
    const char *problem = nullptr;
    void (*body)() = nullptr;
    std::size_t shared_bytes = 0;
};
inline Block block;
alignas(128) inline unsigned char shared_memory[MOST_SHARED + 64];

inline unsigned next_random() {
    block.random = block.random * 1664525u + 1013904223u;
    return block.random >> 8;
}
inline int number() {
    return static_cast<int>(block.current - block.fibers.data());
}
inline void wait(State state) {
    Fiber &fiber = *block.current;
    fiber.state = state;
    if (_setjmp(fiber.place) == 0) {
        _longjmp(block.scheduler, 1);
    }
}
[[noreturn]] inline void stop(const char *problem) {
    block.problem = problem;
    _longjmp(block.scheduler, 1);
}
inline void fiber_main() {
    block.body();
    block.current->state = State::DONE;
    _longjmp(block.scheduler, 1);
}

/* Meets the lanes of the mask, each with a value; where[lane] then is a lane's value. */
template <typename T>
inline const unsigned char (*meet_warp(unsigned mask, int kind, T value))[32] {
    static_assert(sizeof(T) <= 32, "too large to exchange");
    Fiber &fiber = *block.current;
    const int mine = number();
    if ((mask >> (mine % WARP) & 1u) == 0u) {
        stop("a lane takes part in an operation of a warp whose mask does not name it");
    }
    fiber.mask = mask, fiber.kind = kind;
    const unsigned parity = fiber.turn++ & 1u;
    std::memcpy(block.exchange[parity][mine], &value, sizeof value);
    wait(State::AT_WARP);
    return &block.exchange[parity][mine / WARP * WARP];
}
template <typename T> inline T value_of(const unsigned char (*where)[32], int lane) {
    T value;
    std::memcpy(&value, where[lane], sizeof value);
    return value;
}
enum Kind { SHUFFLE = 1, BALLOT, SYNC, MATRIX };

/* Lets the waiting fibers go whose condition is met; whether there were any. */
inline bool release() {
    bool any = false;
    const int count = static_cast<int>(block.fibers.size());
    int left = 0, waiting[16] = {};
    for (const Fiber &fiber : block.fibers) {
        left += fiber.state != State::DONE;
        waiting[fiber.barrier] += fiber.state == State::AT_BARRIER;
    }
    bool open[16] = {};
    for (const Fiber &fiber : block.fibers) {
        if (fiber.state == State::AT_BARRIER) {
            const int needed = fiber.needed ? fiber.needed : left;
            open[fiber.barrier] = waiting[fiber.barrier] == needed;
        }
    }
    for (int first = 0; first < count; first += WARP) {
        for (int lane = 0; lane < WARP && first + lane < count; lane++) {
            Fiber &fiber = block.fibers[first + lane];
            if (fiber.state != State::AT_WARP) {
                continue;
            }
            bool all = true;
            for (int other = 0; other < WARP; other++) {
                if ((fiber.mask >> other & 1u) == 0u) {
                    continue;
                }
                if (first + other >= count || block.fibers[first + other].state == State::DONE) {
                    block.problem = "an operation of a warp names a lane that has left";
                    return false;
                }
                const Fiber &peer = block.fibers[first + other];
                all = all && peer.state == State::AT_WARP;
                if (peer.state == State::AT_WARP &&
                    (peer.mask != fiber.mask || peer.kind != fiber.kind)) {
                    block.problem = "lanes of a warp stand at different operations";
                    return false;
                }
            }
            if (all) {
                const unsigned mask = fiber.mask;
                for (int other = 0; other < WARP; other++) {
                    if (mask >> other & 1u) {
                        block.fibers[first + other].state = State::READY;
                    }
                }
                any = true;
            }
        }
    }
    bool votes[16] = {};
    for (Fiber &fiber : block.fibers) {
        votes[fiber.barrier] |= fiber.state == State::AT_BARRIER && fiber.vote;
    }
    for (Fiber &fiber : block.fibers) {
        if (fiber.state == State::AT_BARRIER && open[fiber.barrier]) {
            fiber.state = State::READY;
            fiber.vote = votes[fiber.barrier];
            any = true;
        }
    }
    return any;
}

inline void run_fiber(int which) {
    Fiber &fiber = block.fibers[which];
    block.current = &fiber;
    if (_setjmp(block.scheduler) == 0) {
        if (!fiber.begun) {
            fiber.begun = true;
            getcontext(&fiber.first);
            fiber.first.uc_stack.ss_sp = block.stacks.get() + which * STACK;
            fiber.first.uc_stack.ss_size = STACK;
            fiber.first.uc_link = nullptr;
            makecontext(&fiber.first, fiber_main, 0);
            setcontext(&fiber.first);
        } else {
            _longjmp(fiber.place, 1);
        }
    }
}

/* Runs one block; false if something went wrong. */
inline bool run_block() {
    const int count = static_cast<int>(block.fibers.size());
    std::vector<int> order(count);
    for (int i = 0; i < count; i++) {
        Fiber &fiber = block.fibers[i];
        const unsigned thread = static_cast<unsigned>(i);
        fiber.begun = false, fiber.state = State::READY, fiber.turn = 0;
        fiber.index = {thread % block.threads.x, thread / block.threads.x % block.threads.y,
                       thread / block.threads.x / block.threads.y};
        order[i] = i;
    }
    for (int i = count - 1; i > 0; i--) {
        std::swap(order[i], order[next_random() % (i + 1)]);
    }
    /* All bits set is NaN. */
    std::memset(shared_memory, 255, sizeof shared_memory);
    for (;;) {
        bool ran = false;
        for (int i : order) {
            while (block.fibers[i].state == State::READY) {
                run_fiber(i);
                ran = true;
                if (block.problem != nullptr) {
                    return false;
                }
            }
        }
        for (std::size_t i = block.shared_bytes; i < sizeof shared_memory; i++) {
            if (shared_memory[i] != 255) {
                block.problem = "shared memory was written beyond what the launch has";
                return false;
            }
        }
        if (release()) {
            continue;
        }
        if (block.problem != nullptr) {
            return false;
        }
        for (const Fiber &fiber : block.fibers) {
            if (fiber.state != State::DONE) {
                block.problem =
                    ran ? "threads wait for others that never come" : "threads wait for each other";
                return false;
            }
        }
        return true;
    }
}

/* Runs a whole grid, its blocks in an order of the seed's; what went wrong, or null. */
inline const char *run_grid(void (*body)(), uint3 grid, unsigned threads, std::size_t shared,
                            unsigned seed) {
    if (shared > MOST_SHARED) {
        return "more shared memory than any GPU has";
    }
    block.fibers.resize(threads);
    if (!block.stacks) {
        block.stacks.reset(new char[1024 * STACK]);
    }
    block.body = body, block.threads = {threads, 1, 1}, block.grid = grid;
    block.shared_bytes = shared, block.problem = nullptr, block.random = seed * 2654435761u + 1u;
    const std::uint64_t blocks = std::uint64_t(grid.x) * grid.y * grid.z;
    const std::uint64_t start = next_random() % blocks;
    const bool backwards = next_random() % 2 != 0;
    for (std::uint64_t i = 0; i < blocks; i++) {
        const std::uint64_t at = (start + (backwards ? blocks - i : i)) % blocks;
        block.index = {static_cast<unsigned>(at % grid.x),
                       static_cast<unsigned>(at / grid.x % grid.y),
                       static_cast<unsigned>(at / grid.x / grid.y)};
        if (!run_block()) {
            return block.problem;
        }
    }
    return nullptr;
}

} // namespace simt

#define threadIdx (simt::block.current->index)
#define blockIdx  (simt::block.index)
#define blockDim  (simt::block.threads)
#define gridDim   (simt::block.grid)

inline void meet_at(int barrier, int threads) {
    simt::block.current->barrier = barrier, simt::block.current->needed = threads;
    simt::block.current->vote = false;
    simt::wait(simt::State::AT_BARRIER);
}
inline void __syncthreads() {
    meet_at(0, 0);
}
inline int __syncthreads_or(int value) {
    simt::Fiber &fiber = *simt::block.current;
    fiber.barrier = 0, fiber.needed = 0, fiber.vote = value != 0;
    simt::wait(simt::State::AT_BARRIER);
    return fiber.vote;
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    simt::meet_warp(mask, simt::SYNC, 0);
}
template <typename T> inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    const auto where = simt::meet_warp(mask, simt::SHUFFLE, value);
    const int own = simt::number() % simt::WARP;
    return simt::value_of<T>(where, own / width * width + lane % width);
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int distance) {
    const auto where = simt::meet_warp(mask, simt::SHUFFLE, value);
    return simt::value_of<T>(where, (simt::number() % simt::WARP) ^ distance);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
    const auto where = simt::meet_warp(mask, simt::SHUFFLE, value);
    const int own = simt::number() % simt::WARP;
    const int from =
        own % width < static_cast<int>(distance) ? own : own - static_cast<int>(distance);
    return simt::value_of<T>(where, from);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
    const auto where = simt::meet_warp(mask, simt::SHUFFLE, value);
    const int own = simt::number() % simt::WARP;
    const int from =
        own % width + static_cast<int>(distance) < width ? own + static_cast<int>(distance) : own;
    return simt::value_of<T>(where, from);
}
inline unsigned __ballot_sync(unsigned mask, int value) {
    const auto where = simt::meet_warp(mask, simt::BALLOT, value);
    unsigned bits = 0;
    for (int lane = 0; lane < simt::WARP; lane++) {
        if (mask >> lane & 1u) {
            bits |= static_cast<unsigned>(simt::value_of<int>(where, lane) != 0) << lane;
        }
    }
    return bits;
}
inline int __any_sync(unsigned mask, int value) {
    return __ballot_sync(mask, value) != 0u;
}
inline int __all_sync(unsigned mask, int value) {
    return __ballot_sync(mask, value) == mask;
}
/* Threads of a block take turns, so plain code is atomic. */
template <typename T> inline T atomicMin(T *place, T value) {
    const T old = *place;
    *place = value < old ? value : old;
    return old;
}
template <typename T> inline T atomicMax(T *place, T value) {
    const T old = *place;
    *place = old < value ? value : old;
    return old;
}
template <typename T> inline T atomicAdd(T *place, T value) {
    const T old = *place;
    *place = old + value;
    return old;
}
