// SPDX-License-Identifier: Apache-2.0
// One or a few decode steps of the SSM state, in place; Mamba-1 and headed form alike:
//
//     state = exp(dt A) state + dt B x,   out = (sum over states of C state + D x) silu(z)
//
// with dt = softplus(dt + dt_bias) where wanted. The state is what moves: it is read and written
// once, in vectors of 4 numbers. `lanes` neighbouring lanes share a channel, each with 4 states, or
// several times 4 that lie `lanes` vectors apart, so that a warp has 32 / lanes channels at once. A
// lane reduces what it has, then the lanes of a channel shuffle. Arithmetic is float32.
//
// Calls of the usual kind have roads of their own (state_update_plain.cuh). Here a warp has one
// channel of each of its groups of lanes, any strides and formats, and states stay in registers
// from token to token. All that a token needs is on its way
// before anything is used, as raw bits (load_bits_any).

using Params = SelectiveStateUpdateParams;

// 4 neighbouring states of a table, or as many of them as there are, as they lie in memory.
struct Raw4 {
    u32 word[4];

    __device__ __forceinline__ void load(const void *data, i64 offset, i64 stride, i64 dtype,
                                         i64 vectors, int count) {
        if (vectors && count >= 4) {
            if (static_cast<int>(dtype) == 0) {
                const uint4 found =
                    *reinterpret_cast<const uint4 *>(static_cast<const u32 *>(data) + offset);
                word[0] = found.x, word[1] = found.y, word[2] = found.z, word[3] = found.w;
            } else {
                const uint2 found =
                    *reinterpret_cast<const uint2 *>(static_cast<const u16 *>(data) + offset);
                word[0] = found.x & 0xffffu, word[1] = found.x >> 16;
                word[2] = found.y & 0xffffu, word[3] = found.y >> 16;
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            word[i] = i < count ? load_bits_any(data, offset + i * stride, dtype) : 0u;
        }
    }
    __device__ __forceinline__ float number(int i, i64 dtype) const {
        return number_of(word[i], dtype);
    }
};

template <typename T>
__device__ __forceinline__ void store_states(void *data, i64 offset, i64 stride, i64 vectors,
                                             int count, const float (&values)[4]) {
    if (vectors && count >= 4) {
        store_n<T, 4>(data, offset, 0, values);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i < count) {
            static_cast<T *>(data)[offset + i * stride] = from_float<T>(values[i]);
        }
    }
}

// With the exact functions: the road for any call need not be quick.
__device__ __forceinline__ float exact_softplus(float value) {
    return value > 20.0f ? value : log1pf(expf(value));
}

// What one token needs of one channel, raw; a lane has VECTORS times 4 of its states.
template <int VECTORS> struct Inputs {
    Raw4 A[VECTORS], B[VECTORS], C[VECTORS];
    u32 x, dt, dt_bias, D, z;
};

template <typename T, int VECTORS> struct Rows {
    static constexpr int CHANNELS = 1;
    const Params &p;
    RowSlots slots;
    i64 row;
    int first_state; // of this lane
    bool leader;
    u32 head[CHANNELS], channel[CHANNELS]; // the channel within its head
    bool inside[CHANNELS];
    float state[CHANNELS][VECTORS][4];

    __device__ __forceinline__ int begin(int vector) const {
        return first_state + vector * 4 * static_cast<int>(p.lanes);
    }
    __device__ __forceinline__ int count(int n, int vector) const {
        return inside[n] ? static_cast<int>(p.dstate) - begin(vector) : 0;
    }
    __device__ __forceinline__ i64 at(int n, i64 head_stride, i64 channel_stride) const {
        return head[n] * head_stride + channel[n] * channel_stride;
    }
    __device__ __forceinline__ void load() {
        const bool kept = slots.accepted > 0;
        const i64 from = kept ? row * p.kept_row_stride + (slots.accepted - 1) * p.kept_token_stride
                              : slots.read * p.start_row_stride;
        const i64 head_stride = kept ? p.kept_head_stride : p.start_head_stride;
        const i64 channel_stride = kept ? p.kept_channel_stride : p.start_channel_stride;
        const i64 stride = kept ? p.kept_state_stride : p.start_state_stride;
        const i64 dtype = kept ? p.kept_dtype : p.state_dtype;
        const i64 vectors = kept ? p.kept_vectors : p.start_vectors;
        Raw4 raw[CHANNELS][VECTORS];
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                raw[n][v].load(kept ? p.kept : p.start,
                               from + at(n, head_stride, channel_stride) + begin(v) * stride,
                               stride, dtype, vectors, count(n, v));
            }
        }
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    state[n][v][i] = raw[n][v].number(i, dtype);
                }
            }
        }
    }
    __device__ __forceinline__ void store() const {
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const i64 offset = slots.write * p.state_row_stride +
                                   at(n, p.state_head_stride, p.state_channel_stride) +
                                   begin(v) * p.state_state_stride;
                store_states<T>(p.state, offset, p.state_state_stride, p.state_vectors, count(n, v),
                                state[n][v]);
            }
        }
    }
    __device__ __forceinline__ void keep(i64 token) const {
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const i64 offset = row * p.kept_row_stride + token * p.kept_token_stride +
                                   at(n, p.kept_head_stride, p.kept_channel_stride);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (i < count(n, v)) {
                        store_any(p.kept, offset + (begin(v) + i) * p.kept_state_stride,
                                  static_cast<int>(p.kept_dtype), state[n][v][i]);
                    }
                }
            }
        }
    }
    __device__ __forceinline__ u32 per_token(const void *data, i64 dtype, i64 row_stride,
                                             i64 token_stride, i64 head_stride, i64 channel_stride,
                                             int n, i64 token) const {
        return load_bits_any(
            data, row * row_stride + token * token_stride + at(n, head_stride, channel_stride),
            dtype);
    }
    __device__ __forceinline__ void fetch(int n, i64 token, Inputs<VECTORS> &in) const {
        if (!inside[n]) {
            return;
        }
        const u32 B_group = head[n] / static_cast<u32>(p.B_heads);
        const u32 C_group = head[n] / static_cast<u32>(p.C_heads);
        in.dt = per_token(p.dt, p.dt_dtype, p.dt_row_stride, p.dt_token_stride, p.dt_head_stride,
                          p.dt_channel_stride, n, token);
        in.x = per_token(p.x, p.x_dtype, p.x_row_stride, p.x_token_stride, p.x_head_stride,
                         p.x_channel_stride, n, token);
        if (p.dt_bias) {
            in.dt_bias = load_bits_any(
                p.dt_bias, at(n, p.dt_bias_head_stride, p.dt_bias_channel_stride), p.dt_bias_dtype);
        }
        if (p.D) {
            in.D = load_bits_any(p.D, at(n, p.D_head_stride, p.D_channel_stride), p.D_dtype);
        }
        if (p.z) {
            in.z = per_token(p.z, p.z_dtype, p.z_row_stride, p.z_token_stride, p.z_head_stride,
                             p.z_channel_stride, n, token);
        }
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            in.A[v].load(p.A,
                         at(n, p.A_head_stride, p.A_channel_stride) + begin(v) * p.A_state_stride,
                         p.A_state_stride, p.A_dtype, p.A_vectors, count(n, v));
            in.B[v].load(p.B,
                         row * p.B_row_stride + token * p.B_token_stride +
                             B_group * p.B_group_stride + begin(v) * p.B_state_stride,
                         p.B_state_stride, p.B_dtype, p.B_vectors, count(n, v));
            in.C[v].load(p.C,
                         row * p.C_row_stride + token * p.C_token_stride +
                             C_group * p.C_group_stride + begin(v) * p.C_state_stride,
                         p.C_state_stride, p.C_dtype, p.C_vectors, count(n, v));
        }
    }
    __device__ __forceinline__ float advance(int n, float x, const Inputs<VECTORS> &in) {
        float dt = number_of(in.dt, p.dt_dtype);
        if (p.dt_bias) {
            dt += number_of(in.dt_bias, p.dt_bias_dtype);
        }
        dt = p.dt_softplus ? exact_softplus(dt) : dt;
        const float input = dt * x;
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float rate = in.A[v].number(i, p.A_dtype);
                if (p.A_is_log) {
                    rate = -expf(rate);
                }
                // A lane may have less than 4 states; what it has beyond is 0 and stays so.
                state[n][v][i] =
                    expf(rate * dt) * state[n][v][i] + input * in.B[v].number(i, p.B_dtype);
                sum += state[n][v][i] * in.C[v].number(i, p.C_dtype);
            }
        }
        return sum;
    }
    __device__ __forceinline__ void put(int n, i64 token, float y) const {
        store_any(p.out,
                  row * p.out_row_stride + token * p.out_token_stride +
                      at(n, p.out_head_stride, p.out_channel_stride),
                  static_cast<int>(p.out_dtype), y);
    }
    __device__ __forceinline__ void step(i64 token) {
        Inputs<VECTORS> in[CHANNELS];
        float x[CHANNELS], sum[CHANNELS];
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            fetch(n, token, in[n]);
        }
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            x[n] = sum[n] = 0.0f;
            if (inside[n]) {
                x[n] = number_of(in[n].x, p.x_dtype);
                sum[n] = advance(n, x[n], in[n]);
            }
        }
        for (int distance = static_cast<int>(p.lanes) / 2; distance > 0; distance /= 2) {
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], distance);
            }
        }
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            if (!inside[n] || !leader) {
                continue;
            }
            if (p.D) {
                sum[n] += x[n] * number_of(in[n].D, p.D_dtype);
            }
            if (p.z) {
                const float z = number_of(in[n].z, p.z_dtype);
                sum[n] *= z / (1.0f + expf(-z));
            }
            put(n, token, sum[n]);
        }
    }
    __device__ __forceinline__ void run() {
        if (slots.padding) {
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                for (i64 token = 0; leader && inside[n] && token < p.num_tokens; token++) {
                    put(n, token, 0.0f);
                }
            }
            return;
        }
        load();
        if (p.accepted) {
            store();
        }
        for (i64 token = 0; token < p.num_tokens; token++) {
            step(token);
            if (p.kept) {
                keep(token);
            }
        }
        if (!p.accepted) {
            store();
        }
    }
};

template <typename T, int VECTORS> __device__ __forceinline__ void update_any(const Params &p) {
    const int lane = threadIdx.x % 32, lanes = static_cast<int>(p.lanes), together = 32 / lanes;
    const u32 channels = static_cast<u32>(p.num_heads * p.head_channels);
    const u32 number =
        (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * together + lane / lanes;
    Rows<T, VECTORS> rows{p};
    rows.first_state = 4 * (lane % lanes);
    rows.leader = lane % lanes == 0;
    rows.inside[0] = number < channels;
    // A row has less than 2^31 channels: their states would not fit into memory.
    rows.head[0] = number / static_cast<u32>(p.head_channels);
    rows.channel[0] = number - rows.head[0] * static_cast<u32>(p.head_channels);
    for (i64 row = blockIdx.y; row < p.batch; row += gridDim.y) {
        rows.row = row;
        rows.slots = slots_of(p, row);
        rows.run();
    }
}

// The grid's x counts groups of channels and its y rows, over which blocks loop if there are more.
// ROAD: 0 for any call, 1 for channels, 2 for heads (state_update_plain.cuh).
template <int ROAD, typename T, typename X, int NUMBER>
__device__ __forceinline__ void selective_state_update(const Params &p) {
    if constexpr (ROAD == 1) {
        update_channels<T, X, NUMBER>(p);
    } else if constexpr (ROAD == 2) {
        update_heads<T, X, NUMBER>(p);
    } else {
        update_any<T, NUMBER>(p);
    }
}
