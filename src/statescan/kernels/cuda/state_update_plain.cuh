// SPDX-License-Identifier: Apache-2.0
// The plain roads of selective_state_update: one token, nothing kept, states in whole vectors, the
// dtypes that models have. What does not change from row to row stays in registers, and a warp
// walks over rows: done anew for each row, addresses and A cost three times the arithmetic
// (H200, 512 rows: 72 instructions a state).
//
// Channels road (Mamba-1's form): `lanes` neighbouring lanes share a channel, each with 4 states of
// it, so that a warp has 32 / lanes channels at once, CHANNELS times. A, D and dt_bias are loaded
// once.
//
// Heads road (Mamba-2's form: one A, dt, dt_bias and D a head): a warp has one head's channels, and
// B, C and the decay of a row serve all of these. A lane has VECTORS times 4 states of a channel,
// which lie `lanes` vectors apart; so the sum over states takes few shuffles.
//
// Offsets within a row fit 32 bits, which the launcher sees to.

template <int N> __device__ __forceinline__ void sum_over_lanes(float (&sum)[N], int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], distance);
        }
    }
}

// exp2 of a rate times the step is the decay: -exp(A) log2(e), or A log2(e).
template <typename P> __device__ __forceinline__ float rate_of(const P &p, float A) {
    return (p.A_is_log ? -exp2_approx(A * STATESCAN_LOG2E) : A) * STATESCAN_LOG2E;
}

template <typename T, typename X, int CHANNELS, typename P>
__device__ __forceinline__ void update_channels(const P &p) {
    const int lane = threadIdx.x % 32, lanes = static_cast<int>(p.lanes), together = 32 / lanes;
    const int begin = 4 * (lane % lanes);
    const bool leader = lane % lanes == 0;
    const u32 head_channels = static_cast<u32>(p.head_channels);
    const u32 tile = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const u32 tiles = static_cast<u32>(p.head_tiles);
    const u32 head = tile / tiles;
    if (head >= static_cast<u32>(p.num_heads)) {
        return;
    }
    const u32 first = (tile - head * tiles) * static_cast<u32>(p.tile_channels) + lane / lanes;
    // Lanes beyond the last channel or state load what another one has: without a branch all loads
    // of a row are on their way at once.
    const bool has_states = begin < static_cast<int>(p.dstate);
    const int first_state = has_states ? begin : 0;
    const i64 B_at = head / static_cast<u32>(p.B_heads) * p.B_group_stride + first_state;
    const i64 C_at = head / static_cast<u32>(p.C_heads) * p.C_group_stride + first_state;
    bool inside[CHANNELS];
    int from[CHANNELS], to[CHANNELS], x_at[CHANNELS], dt_at[CHANNELS], z_at[CHANNELS];
    int out_at[CHANNELS];
    float rate[CHANNELS][4], dt_bias[CHANNELS], D[CHANNELS];
#pragma unroll
    for (int n = 0; n < CHANNELS; n++) {
        const u32 wanted = first + n * together;
        const u32 channel = wanted < head_channels ? wanted : head_channels - 1;
        inside[n] = wanted < head_channels && has_states;
        from[n] = head * p.start_head_stride + channel * p.start_channel_stride + first_state;
        to[n] = head * p.state_head_stride + channel * p.state_channel_stride + first_state;
        x_at[n] = head * p.x_head_stride + channel * p.x_channel_stride;
        dt_at[n] = head * p.dt_head_stride + channel * p.dt_channel_stride;
        z_at[n] = p.z ? head * p.z_head_stride + channel * p.z_channel_stride : x_at[n];
        out_at[n] = head * p.out_head_stride + channel * p.out_channel_stride;
        dt_bias[n] = D[n] = 0.0f;
        const float *A =
            static_cast<const float *>(p.A) + head * p.A_head_stride + channel * p.A_channel_stride;
        if (p.A_vectors) {
            load_n<float, 4>(A, first_state, 0, rate[n]);
        } else {
            rate[n][0] = rate[n][1] = rate[n][2] = rate[n][3] = A[0];
        }
        if (p.dt_bias) {
            dt_bias[n] = static_cast<const float *>(
                p.dt_bias)[head * p.dt_bias_head_stride + channel * p.dt_bias_channel_stride];
        }
        if (p.D) {
            D[n] = static_cast<const float *>(
                p.D)[head * p.D_head_stride + channel * p.D_channel_stride];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            rate[n][i] = rate_of(p, rate[n][i]);
        }
    }
    const X *const z_or_x = static_cast<const X *>(p.z ? p.z : p.x);
    const i64 z_row_stride = p.z ? p.z_row_stride : p.x_row_stride;
    for (i64 row = blockIdx.y; row < p.batch; row += gridDim.y) {
        const RowSlots slots = slots_of(p, row);
        X *out = static_cast<X *>(p.out) + row * p.out_row_stride;
        if (slots.padding) {
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                if (leader && inside[n]) {
                    out[out_at[n]] = from_float<X>(0.0f);
                }
            }
            continue;
        }
        const T *start = static_cast<const T *>(p.start) + slots.read * p.start_row_stride;
        const X *xs = static_cast<const X *>(p.x) + row * p.x_row_stride;
        const X *dts = static_cast<const X *>(p.dt) + row * p.dt_row_stride;
        const X *zs = z_or_x + row * z_row_stride;
        float state[CHANNELS][4], x[CHANNELS], dt[CHANNELS], z[CHANNELS], B[4], C[4];
        float sum[CHANNELS];
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            load_n<T, 4>(start, from[n], 0, state[n]);
            x[n] = to_float(xs[x_at[n]]);
            dt[n] = to_float(dts[dt_at[n]]) + dt_bias[n];
            z[n] = to_float(zs[z_at[n]]);
        }
        load_n<X, 4>(p.B, row * p.B_row_stride + B_at, 0, B);
        load_n<X, 4>(p.C, row * p.C_row_stride + C_at, 0, C);
        if (p.dt_softplus) {
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                dt[n] = softplus(dt[n]);
            }
        }
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            const float input = dt[n] * x[n];
            sum[n] = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                state[n][i] = exp2_approx(rate[n][i] * dt[n]) * state[n][i] + input * B[i];
                sum[n] += has_states ? state[n][i] * C[i] : 0.0f;
            }
        }
        sum_over_lanes(sum, lanes);
        T *target = static_cast<T *>(p.state) + slots.write * p.state_row_stride;
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            if (!inside[n]) {
                continue;
            }
            store_n<T, 4>(target, to[n], 0, state[n]);
            if (leader) {
                const float y = sum[n] + x[n] * D[n];
                out[out_at[n]] = from_float<X>(p.z ? y * z[n] * sigmoid(z[n]) : y);
            }
        }
    }
}

template <typename T, typename X, int VECTORS, typename P>
__device__ __forceinline__ void update_heads(const P &p) {
    const int lane = threadIdx.x % 32, lanes = static_cast<int>(p.lanes), together = 32 / lanes;
    const int begin = 4 * (lane % lanes), apart = 4 * lanes;
    const u32 tile = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const u32 tiles = static_cast<u32>(p.head_tiles);
    const u32 head = tile / tiles;
    if (head >= static_cast<u32>(p.num_heads)) {
        return;
    }
    const int tile_channels = static_cast<int>(p.tile_channels);
    const int first = static_cast<int>(tile - head * tiles) * tile_channels;
    const int head_channels = static_cast<int>(p.head_channels);
    const int end = first + tile_channels < head_channels ? first + tile_channels : head_channels;
    const i64 B_at = head / static_cast<u32>(p.B_heads) * p.B_group_stride + begin;
    const i64 C_at = head / static_cast<u32>(p.C_heads) * p.C_group_stride + begin;
    const float rate = rate_of(p, static_cast<const float *>(p.A)[head * p.A_head_stride]);
    const float dt_bias =
        p.dt_bias ? static_cast<const float *>(p.dt_bias)[head * p.dt_bias_head_stride] : 0.0f;
    const float D = p.D ? static_cast<const float *>(p.D)[head * p.D_head_stride] : 0.0f;
    for (i64 row = blockIdx.y; row < p.batch; row += gridDim.y) {
        const RowSlots slots = slots_of(p, row);
        X *out = static_cast<X *>(p.out) + row * p.out_row_stride + head * p.out_head_stride;
        if (slots.padding) {
            for (int channel = first + lane; channel < end; channel += 32) {
                out[channel * p.out_channel_stride] = from_float<X>(0.0f);
            }
            continue;
        }
        const X *xs = static_cast<const X *>(p.x) + row * p.x_row_stride + head * p.x_head_stride;
        const X *zs = static_cast<const X *>(p.z) + row * p.z_row_stride + head * p.z_head_stride;
        const T *start = static_cast<const T *>(p.start) + slots.read * p.start_row_stride +
                         head * p.start_head_stride;
        T *target = static_cast<T *>(p.state) + slots.write * p.state_row_stride +
                    head * p.state_head_stride;
        const float given =
            to_float(static_cast<const X *>(p.dt)[row * p.dt_row_stride + head * p.dt_head_stride]);
        float B[VECTORS][4], C[VECTORS][4];
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            load_n<X, 4>(p.B, row * p.B_row_stride + B_at + v * apart, 0, B[v]);
            load_n<X, 4>(p.C, row * p.C_row_stride + C_at + v * apart, 0, C[v]);
        }
        const float step = p.dt_softplus ? softplus(given + dt_bias) : given + dt_bias;
        const float decay = exp2_approx(rate * step);
        // Lanes without a channel help to sum.
        for (int base = first; base < end; base += together) {
            const int channel = base + lane / lanes;
            const bool inside = channel < end;
            const int from = channel * static_cast<int>(p.start_channel_stride) + begin;
            const int to = channel * static_cast<int>(p.state_channel_stride) + begin;
            float state[VECTORS][4], x = 0.0f, z = 0.0f, sum[1] = {0.0f};
            if (inside) {
#pragma unroll
                for (int v = 0; v < VECTORS; v++) {
                    load_n<T, 4>(start, from + v * apart, 0, state[v]);
                }
                x = to_float(xs[channel * static_cast<int>(p.x_channel_stride)]);
                z = p.z ? to_float(zs[channel * static_cast<int>(p.z_channel_stride)]) : 0.0f;
                const float input = step * x;
#pragma unroll
                for (int v = 0; v < VECTORS; v++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        state[v][i] = decay * state[v][i] + input * B[v][i];
                        sum[0] += state[v][i] * C[v][i];
                    }
                    store_n<T, 4>(target, to + v * apart, 0, state[v]);
                }
            }
            sum_over_lanes(sum, lanes);
            if (inside && lane % lanes == 0) {
                const float y = sum[0] + x * D;
                out[channel * static_cast<int>(p.out_channel_stride)] =
                    from_float<X>(p.z ? y * z * sigmoid(z) : y);
            }
        }
    }
}
