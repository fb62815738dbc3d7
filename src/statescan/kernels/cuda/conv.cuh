// SPDX-License-Identifier: Apache-2.0
// What both directions of the causal convolution share: taps, tokens in the order of processing,
// vectors of a row, and a slow scalar road for the few tokens where a sequence begins or ends.
//
// A step is a token in the order of processing: token = step, or seqlen - 1 - step in reverse. Taps
// are named by their distance: tap d, 0 to width - 1, meets the input d steps before, so it is
// weight[width - 1 - d]. Kernels for up to TAPS taps keep them in registers; a tap from width on
// does not exist and is skipped rather than multiplied by 0, since the input it would meet may be
// no number.

__device__ __forceinline__ i64 smaller(i64 a, i64 b) {
    return a < b ? a : b;
}

template <int TAPS> __device__ __forceinline__ bool has_tap(int distance, int width) {
    return TAPS == 4 || distance < width;
}

// Division by a divisor of the call: in 32 bits wherever that is enough, 5 times quicker.
__device__ __forceinline__ void divide(i64 value, i64 divisor, i64 &quotient, i64 &remainder) {
    if (((value | divisor) >> 32) == 0) {
        quotient = static_cast<u32>(value) / static_cast<u32>(divisor);
    } else {
        quotient = value / divisor;
    }
    remainder = value - quotient * divisor;
}

// Number format known at run time only; see load_any.
struct any_t {};

// The bits of a number whose format is known at run time, and what they mean. Apart, since the one
// does not wait for memory: a load that is converted at once keeps the next one from starting.
__device__ __forceinline__ u32 load_bits_any(const void *data, i64 offset, i64 dtype) {
    u32 bits;
    if (static_cast<int>(dtype) == 0) {
        bits = static_cast<const u32 *>(data)[offset];
    } else {
        bits = static_cast<const u16 *>(data)[offset];
    }
    return bits;
}
__device__ __forceinline__ float number_of(u32 bits, i64 dtype) {
    const int format = static_cast<int>(dtype);
    const float brain = __uint_as_float(format == 0 ? bits : bits << 16);
    return format == 2 ? to_float(f16{static_cast<u16>(bits)}) : brain;
}

// N neighbours from an address aligned to all of them, or to 16 bytes if they are more.
template <typename T, int N>
__device__ __forceinline__ void load_n(const void *data, i64 offset, i64 dtype,
                                       float (&values)[N]) {
    if constexpr (sizeof(T) == 1) {
        static_assert(N == 1, "numbers of unknown format are loaded one by one");
        values[0] = load_any(data, offset, static_cast<int>(dtype));
    } else {
        const T *source = static_cast<const T *>(data) + offset;
        if constexpr (N == 8) {
            load8(source, values);
        } else if constexpr (N == 4 && sizeof(T) == 4) {
            float4 four = *reinterpret_cast<const float4 *>(source);
            values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
        } else if constexpr (N == 2 && sizeof(T) == 4) {
            float2 two = *reinterpret_cast<const float2 *>(source);
            values[0] = two.x, values[1] = two.y;
        } else if constexpr (N == 4) {
            uint2 packed = *reinterpret_cast<const uint2 *>(source);
            values[0] = low2<T>(packed.x), values[1] = high2<T>(packed.x);
            values[2] = low2<T>(packed.y), values[3] = high2<T>(packed.y);
        } else if constexpr (N == 2) {
            u32 packed = *reinterpret_cast<const u32 *>(source);
            values[0] = low2<T>(packed), values[1] = high2<T>(packed);
        } else {
            static_assert(N == 1, "no such vector");
            values[0] = to_float(*source);
        }
    }
}
template <typename T, int N>
__device__ __forceinline__ void store_n(void *data, i64 offset, i64 dtype,
                                        const float (&values)[N]) {
    if constexpr (sizeof(T) == 1) {
        static_assert(N == 1, "numbers of unknown format are stored one by one");
        store_any(data, offset, static_cast<int>(dtype), values[0]);
    } else {
        T *target = static_cast<T *>(data) + offset;
        if constexpr (N == 8) {
            store8(target, values);
        } else if constexpr (N == 4 && sizeof(T) == 4) {
            *reinterpret_cast<float4 *>(target) =
                make_float4(values[0], values[1], values[2], values[3]);
        } else if constexpr (N == 2 && sizeof(T) == 4) {
            *reinterpret_cast<float2 *>(target) = make_float2(values[0], values[1]);
        } else if constexpr (N == 4) {
            *reinterpret_cast<uint2 *>(target) =
                make_uint2(pack2<T>(values[0], values[1]), pack2<T>(values[2], values[3]));
        } else if constexpr (N == 2) {
            *reinterpret_cast<u32 *>(target) = pack2<T>(values[0], values[1]);
        } else {
            static_assert(N == 1, "no such vector");
            *target = from_float<T>(values[0]);
        }
    }
}

// N neighbours as they lie in memory, so that what is loaded need not be waited for at once.
template <typename T, int N> struct Packed {
    static constexpr int WORDS = N * sizeof(T) / 4;
    u32 word[WORDS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            word[i] = 0u;
        }
    }
    // From an address aligned to all of them, or to 16 bytes if they are more.
    __device__ __forceinline__ void load(const T *source) {
        if constexpr (WORDS == 1) {
            word[0] = *reinterpret_cast<const u32 *>(source);
        } else if constexpr (WORDS == 2) {
            const uint2 found = *reinterpret_cast<const uint2 *>(source);
            word[0] = found.x, word[1] = found.y;
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4) {
                const uint4 found = reinterpret_cast<const uint4 *>(source)[i / 4];
                word[i] = found.x, word[i + 1] = found.y;
                word[i + 2] = found.z, word[i + 3] = found.w;
            }
        }
    }
    __device__ __forceinline__ float at(int i) const {
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(word[i]);
        } else {
            return i % 2 ? high2<T>(word[i / 2]) : low2<T>(word[i / 2]);
        }
    }
};

// Derivative of value * sigmoid(value).
__device__ __forceinline__ float silu_slope(float value) {
    float s = sigmoid(value);
    return s * (1.0f + value * (1.0f - s));
}

// One channel of one row, read number by number from wherever it lies. P is the parameter struct
// of either direction.
template <typename P> struct Channel {
    const P &p;
    i64 row, channel;

    __device__ __forceinline__ i64 token(i64 step) const {
        return p.reverse ? p.seqlen - 1 - step : step;
    }
    __device__ __forceinline__ i64 x_at(i64 step) const {
        return row * p.x_batch_stride + channel * p.x_dim_stride + token(step) * p.x_seqlen_stride;
    }
    __device__ __forceinline__ float x(i64 step) const {
        return load_any(p.x, x_at(step), static_cast<int>(p.x_dtype));
    }
    // Step 0 begins a sequence in any case: where marks are given they say so too.
    __device__ __forceinline__ u32 mark(i64 step) const {
        if (p.marks) {
            return static_cast<const u32 *>(p.marks)[row * p.seqlen + token(step)];
        }
        return (step == 0 ? MARK_START | MARK_INITIAL : 0u) |
               (step == p.seqlen - 1 ? MARK_END | MARK_FINAL : 0u);
    }
    // Bit i says whether step `first` + i is marked; only whether any is counts in reverse.
    __device__ __forceinline__ u32 marked(i64 first, int count) const {
        const Marks marks = {static_cast<const u32 *>(p.marks),
                             static_cast<const u32 *>(p.occupied), p.seqlen, p.words};
        const i64 low = p.reverse ? p.seqlen - first - count : first;
        return marks.window(row, low) & (count < 32 ? (1u << count) - 1u : ~0u);
    }
    __device__ __forceinline__ float tap(i64 distance) const {
        const i64 offset =
            channel * p.weight_dim_stride + (p.width - 1 - distance) * p.weight_width_stride;
        return load_any(p.weight, offset, static_cast<int>(p.weight_dtype));
    }
    __device__ __forceinline__ float bias() const {
        return p.bias
                   ? load_any(p.bias, channel * p.bias_dim_stride, static_cast<int>(p.bias_dtype))
                   : 0.0f;
    }
    // A column of the state in which a sequence begins at a token of this mark; -1 and below: 0.
    __device__ __forceinline__ float initial(u32 start, i64 column) const {
        if (!p.initial_states || !(start & MARK_INITIAL) || column < 0) {
            return 0.0f;
        }
        const i64 offset = mark_state(start, row) * p.initial_batch_stride +
                           channel * p.initial_dim_stride + column * p.initial_width_stride;
        return load_any(p.initial_states, offset, static_cast<int>(p.initial_dtype));
    }
    // Calls visit(d, input d steps before) for d below `count`: inputs of the step's own sequence,
    // and what is before its beginning from the columns of the initial state.
    template <typename F>
    __device__ __forceinline__ void inputs(i64 step, i64 count, F visit) const {
        i64 since = -1;
        u32 start = 0;
        for (i64 d = 0; d < count; d++) {
            if (since >= 0) {
                visit(d, initial(start, p.width - 1 - (d - since)));
                continue;
            }
            visit(d, x(step - d));
            const u32 found = mark(step - d);
            if (found & MARK_START) {
                since = d;
                start = found;
            }
        }
    }
    __device__ __forceinline__ float convolved(i64 step) const {
        float sum = bias();
        inputs(step, p.width, [&](i64 d, float value) { sum += tap(d) * value; });
        return sum;
    }
};

// All taps of N neighbouring channels, and their biases.
template <int TAPS, int N> struct Taps {
    float tap[TAPS][N];
    float bias[N];

    template <typename P> __device__ __forceinline__ void load(const P &p, i64 channel) {
        u32 bits[TAPS + 1][N];
#pragma unroll
        for (int n = 0; n < N; n++) {
            const i64 row = (channel + n) * p.weight_dim_stride;
            bits[TAPS][n] = 0u;
            if (p.bias) {
                bits[TAPS][n] =
                    load_bits_any(p.bias, (channel + n) * p.bias_dim_stride, p.bias_dtype);
            }
#pragma unroll
            for (int d = 0; d < TAPS; d++) {
                bits[d][n] = 0u;
                if (d < p.width) {
                    bits[d][n] = load_bits_any(
                        p.weight, row + (p.width - 1 - d) * p.weight_width_stride, p.weight_dtype);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            bias[n] = number_of(bits[TAPS][n], p.bias_dtype);
#pragma unroll
            for (int d = 0; d < TAPS; d++) {
                tap[d][n] = number_of(bits[d][n], p.weight_dtype);
            }
        }
    }
};

// The taps of one channel for a whole warp: a lane loads one, which then goes round.
template <int TAPS> struct WarpTaps {
    float mine;

    template <typename P> __device__ __forceinline__ void load(const P &p, i64 channel) {
        const int lane = threadIdx.x % 32;
        const Channel<P> one{p, 0, channel};
        mine = 0.0f;
        if (lane < TAPS && lane < p.width) {
            mine = one.tap(lane);
        } else if (lane == TAPS) {
            mine = one.bias();
        }
    }
    __device__ __forceinline__ void share(float (&tap)[TAPS], float &bias) const {
#pragma unroll
        for (int d = 0; d < TAPS; d++) {
            tap[d] = __shfl_sync(0xffffffffu, mine, d);
        }
        bias = __shfl_sync(0xffffffffu, mine, TAPS);
    }
};

// The inputs before `step`, newest first, for N neighbouring channels. Returns how many steps ago
// the step's sequence began, at most COUNT + 1; 0 if it begins there.
template <typename P, int COUNT, int N>
__device__ __forceinline__ int load_history(const Channel<P> &first, i64 step,
                                            float (&history)[COUNT][N]) {
    int since = -1;
    u32 start = 0;
#pragma unroll
    for (int d = 0; d < COUNT; d++) {
        const bool before = since >= 0 || step - 1 - d < 0;
        if (before && since < 0) {
            since = d;
            start = first.p.marks ? 0u : MARK_START | MARK_INITIAL;
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            const Channel<P> one{first.p, first.row, first.channel + n};
            history[d][n] = 0.0f;
            if (d < first.p.width - 1) {
                history[d][n] = before ? one.initial(start, first.p.width - 1 - (d + 1 - since))
                                       : one.x(step - 1 - d);
            }
        }
        if (!before) {
            const u32 mark = first.mark(step - 1 - d);
            if (mark & MARK_START) {
                since = d + 1;
                start = mark;
            }
        }
    }
    return since >= 0 ? since : COUNT + 1;
}

// Neighbouring tokens of a row whose tokens are neighbours in memory. Vectors begin at addresses
// that are multiples of 16 bytes, so the first one of a row may begin before its first token.
template <typename T> struct RowVectors {
    static constexpr int ALIGN = 16 / sizeof(T);
    const T *data; // token 0
    i64 seqlen;

    // Tokens that vector 0 begins before token 0.
    __device__ __forceinline__ i64 lead() const {
        return static_cast<i64>((reinterpret_cast<unsigned long long>(data) / sizeof(T)) &
                                (ALIGN - 1));
    }
    // Tokens from `first` on, zeros outside of the row.
    template <int N> __device__ __forceinline__ void load(i64 first, float (&values)[N]) const {
        if (first >= 0 && first + N <= seqlen) {
            load_n<T, N>(data, first, 0, values);
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) {
                const i64 token = first + i;
                values[i] = token >= 0 && token < seqlen ? to_float(data[token]) : 0.0f;
            }
        }
    }
};

template <typename T, int N>
__device__ __forceinline__ void store_row(T *data, i64 seqlen, i64 first,
                                          const float (&values)[N]) {
    const bool aligned = (reinterpret_cast<unsigned long long>(data + first) & 15) == 0;
    if (aligned && first >= 0 && first + N <= seqlen) {
        store_n<T, N>(data, first, 0, values);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const i64 token = first + i;
            if (token >= 0 && token < seqlen) {
                data[token] = from_float<T>(values[i]);
            }
        }
    }
}

template <int N> __device__ __forceinline__ void turn_around(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        float other = values[i];
        values[i] = values[N - 1 - i];
        values[N - 1 - i] = other;
    }
}

// What the marks of neighbouring steps say, a bit a step: bit i is step `first` + i.
struct StepMarks {
    u32 barrier; // begins a sequence, or is padding: no tap reaches across
    u32 padding;
    u32 initial;
    u32 final;

    // Steps `first` to `first` + count - 1 of one row; count at most 32.
    template <typename P>
    __device__ __forceinline__ void load(const Channel<P> &channel, i64 first, int count) {
        barrier = padding = initial = final = 0;
        for (int i = 0; i < count; i++) {
            const i64 step = first + i;
            if (step < 0 || step >= channel.p.seqlen) {
                continue;
            }
            const u32 mark = channel.mark(step);
            barrier |= mark & (MARK_START | MARK_PADDING) ? 1u << i : 0u;
            padding |= mark & MARK_PADDING ? 1u << i : 0u;
            initial |= mark & MARK_INITIAL ? 1u << i : 0u;
            final |= mark & MARK_FINAL ? 1u << i : 0u;
        }
    }
    // Whether no sequence begins after bit `low` and up to bit `high`.
    __device__ __forceinline__ bool joined(int low, int high) const {
        return (barrier & ((2u << high) - (2u << low))) == 0u;
    }
};

// The input d steps before the step of bit `bit`, where `inside` is that of the window; `first` is
// the step of bit 0.
template <typename P>
__device__ __forceinline__ float joined_input(const Channel<P> &channel, const StepMarks &marks,
                                              i64 first, int bit, int d, float inside) {
    if (marks.joined(bit - d, bit)) {
        return inside;
    }
    if (!marks.initial || !channel.p.initial_states) {
        return 0.0f;
    }
    const int begin = 31 - __clz(static_cast<int>(marks.barrier & ((2u << bit) - 1u)));
    const u32 mark = (marks.initial >> begin) & 1u ? channel.mark(first + begin) : 0u;
    return channel.initial(mark, channel.p.width - 1 - (d - (bit - begin)));
}
