// SPDX-License-Identifier: Apache-2.0
// One or a few new tokens of the causal convolution, states in place.
//
// With a STATE_LEN: one token, width 4, no ring and nothing kept, one dtype, the columns of a
// channel and the channels of a slot neighbours. A thread has 4 channels, whose states it moves in
// vectors, of a few rows, so that the taps are read once. Otherwise a thread has a row and a
// channel, whatever the strides, and reads what it needs of the state before it writes. Neither
// needs other threads. Inputs are named by their age: age 0 is the first new token, age -1 the
// newest one in the state. Arithmetic is float32.

__device__ __forceinline__ float activated(float value, i64 silu) {
    return silu ? value * sigmoid(value) : value;
}

using Params = CausalConv1dUpdateParams;

// What a thread has of one row: raw until it is needed, so that all loads are under way together.
template <typename T, int STATE_LEN> struct DenseRow {
    Packed<T, 4> x, state[STATE_LEN]; // as in memory: all columns of a channel, then the next's
    RowSlots slots;

    __device__ __forceinline__ void load(const Params &p, i64 row, i64 channel) {
        slots = slots_of(p, row);
        x.clear();
        const T *source =
            static_cast<const T *>(p.start) + slots.read * p.start_row_stride + channel * STATE_LEN;
        if (!slots.padding) {
            x.load(static_cast<const T *>(p.x) + row * p.x_row_stride + channel);
        }
#pragma unroll
        for (int i = 0; i < STATE_LEN; i++) {
            state[i].clear();
            if (!slots.padding) {
                state[i].load(source + 4 * i);
            }
        }
    }
    __device__ __forceinline__ float column(int n, int number) const {
        const int place = n * STATE_LEN + number;
        return state[place / 4].at(place % 4);
    }
    __device__ __forceinline__ void store(const Params &p, i64 row, i64 channel,
                                          const Packed<T, 4> (&taps)[4],
                                          const Packed<T, 4> &bias) const {
        float result[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float sum = bias.at(n) + taps[n].at(3) * x.at(n);
#pragma unroll
            for (int d = 1; d < 4; d++) {
                sum += taps[n].at(3 - d) * column(n, STATE_LEN - d);
            }
            result[n] = slots.padding ? 0.0f : activated(sum, p.silu);
        }
        store_n<T, 4>(p.out, row * p.out_row_stride + channel, 0, result);
        if (slots.padding) {
            return;
        }
        const i64 offset = slots.write * p.state_row_stride + channel * STATE_LEN;
#pragma unroll
        for (int i = 0; i < STATE_LEN; i++) {
            float four[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int n = (4 * i + j) / STATE_LEN, number = (4 * i + j) % STATE_LEN;
                four[j] = number == STATE_LEN - 1
                              ? x.at(n)
                              : column(n, number == STATE_LEN - 1 ? 0 : number + 1);
            }
            store_n<T, 4>(p.state, offset + 4 * i, 0, four);
        }
    }
};

// The grid's x counts groups of 4 channels, a thread each, and y groups of rows.
template <typename T, int STATE_LEN> __device__ __forceinline__ void update_dense(const Params &p) {
    constexpr int TOGETHER = 2;
    const i64 channel = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (channel >= p.dim) {
        return;
    }
    Packed<T, 4> taps[4], bias;
    bias.clear();
    if (p.bias) {
        bias.load(static_cast<const T *>(p.bias) + channel);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        taps[n].load(static_cast<const T *>(p.weight) + (channel + n) * 4);
    }
    for (i64 first = blockIdx.y * p.rows; first < p.batch; first += gridDim.y * p.rows) {
        const i64 end = smaller(first + p.rows, p.batch);
#pragma unroll 1
        for (i64 row = first; row < end; row += TOGETHER) {
            DenseRow<T, STATE_LEN> rows[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                if (row + i < end) {
                    rows[i].load(p, row + i, channel);
                }
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                if (row + i < end) {
                    rows[i].store(p, row + i, channel, taps, bias);
                }
            }
        }
    }
}

// The column of a ring where its token number `number` lies.
__device__ __forceinline__ i64 ring_column(i64 number, i64 state_len) {
    const i64 column = number % state_len;
    return column < 0 ? column + state_len : column;
}

struct Step {
    const Params &p;
    i64 row, channel;
    i64 position;       // tokens that the ring has seen
    const void *source; // the starting state of this row and channel, its columns
    i64 source_offset, source_stride;
    int source_dtype;

    __device__ __forceinline__ float column(i64 number) const {
        return load_any(source, source_offset + number * source_stride, source_dtype);
    }
    __device__ __forceinline__ float token(i64 number) const {
        return load_any(
            p.x, row * p.x_row_stride + channel * p.x_channel_stride + number * p.x_token_stride,
            static_cast<int>(p.x_dtype));
    }
    __device__ __forceinline__ float input(i64 age) const {
        if (age >= 0) {
            return token(age);
        }
        return column(p.positions ? ring_column(position + age, p.state_len) : p.state_len + age);
    }
    // Column `number` of the state after `count` new tokens.
    __device__ __forceinline__ float column_after(i64 number, i64 count) const {
        if (!p.positions) {
            return input(count - p.state_len + number);
        }
        // The newest of the tokens that fall on this column: at most state_len before the last.
        const i64 last = position + count - 1;
        const i64 newest = count - 1 - ring_column(last - number, p.state_len);
        return newest >= 0 ? token(newest) : column(number);
    }
    // In ascending order, so that a state may move onto itself: a column needs later ones only.
    __device__ __forceinline__ void put(void *target, i64 offset, i64 stride, int dtype,
                                        i64 count) const {
        for (i64 number = 0; number < p.state_len; number++) {
            const float value = column_after(number, count);
            store_any(target, offset + number * stride, dtype, value);
        }
    }
    __device__ __forceinline__ i64 kept_at(i64 number) const {
        return row * p.kept_row_stride + number * p.kept_token_stride +
               channel * p.kept_channel_stride;
    }
    __device__ __forceinline__ void keep(i64 number) const {
        put(p.kept, kept_at(number), p.kept_column_stride, static_cast<int>(p.kept_dtype),
            number + 1);
    }
};

__device__ __forceinline__ void write_results(const Step &step, bool padding) {
    const Params &p = step.p;
    const float bias = p.bias && !padding ? load_any(p.bias, step.channel * p.bias_dim_stride,
                                                     static_cast<int>(p.bias_dtype))
                                          : 0.0f;
    for (i64 number = 0; number < p.num_tokens; number++) {
        float sum = bias;
        for (i64 tap = 0; !padding && tap < p.width; tap++) {
            const float weight =
                load_any(p.weight, step.channel * p.weight_dim_stride + tap * p.weight_width_stride,
                         static_cast<int>(p.weight_dtype));
            sum += weight * step.input(number - (p.width - 1) + tap);
        }
        store_any(p.out,
                  step.row * p.out_row_stride + step.channel * p.out_channel_stride +
                      number * p.out_token_stride,
                  static_cast<int>(p.out_dtype), padding ? 0.0f : activated(sum, p.silu));
    }
}

__device__ __forceinline__ void update_one(const Params &p, i64 row, i64 channel) {
    const RowSlots slots = slots_of(p, row);
    Step step{p, row, channel, 0, nullptr, 0, 0, 0};
    if (slots.padding) {
        write_results(step, true);
        return;
    }
    if (p.positions) {
        step.position = index_of(p.positions, p.positions_bits, p.positions_stride, row);
    }
    if (slots.accepted > 0) {
        step.source = p.kept;
        step.source_offset = step.kept_at(slots.accepted - 1);
        step.source_stride = p.kept_column_stride;
        step.source_dtype = static_cast<int>(p.kept_dtype);
    } else {
        step.source = p.start;
        step.source_offset = slots.read * p.start_row_stride + channel * p.start_channel_stride;
        step.source_stride = p.start_column_stride;
        step.source_dtype = static_cast<int>(p.state_dtype);
    }
    write_results(step, false);
    const i64 target = slots.write * p.state_row_stride + channel * p.state_channel_stride;
    // Whatever the starting state lies in is written last.
    if (p.accepted) {
        for (i64 number = 0; number < p.state_len; number++) {
            store_any(p.state, target + number * p.state_column_stride,
                      static_cast<int>(p.state_dtype), step.column(number));
        }
    }
    for (i64 number = 0; p.kept && number < p.num_tokens; number++) {
        if (number != slots.accepted - 1) {
            step.keep(number);
        }
    }
    if (p.kept && slots.accepted > 0 && slots.accepted <= p.num_tokens) {
        step.keep(slots.accepted - 1);
    }
    if (!p.accepted) {
        step.put(p.state, target, p.state_column_stride, static_cast<int>(p.state_dtype),
                 p.num_tokens);
    }
}

template <typename T, int STATE_LEN>
__device__ __forceinline__ void causal_conv1d_update(const Params &p) {
    if constexpr (STATE_LEN > 0) {
        update_dense<T, STATE_LEN>(p);
    } else {
        for (i64 unit = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
             unit < p.batch * p.dim; unit += static_cast<i64>(gridDim.x) * blockDim.x) {
            i64 row, channel;
            divide(unit, p.dim, row, channel);
            update_one(p, row, channel);
        }
    }
}
