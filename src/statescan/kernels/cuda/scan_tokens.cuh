// SPDX-License-Identifier: Apache-2.0
// The tokens of a lane in the forward selective scan: x, dt, z and out of its channel, by vectors
// or one by one, on their way through the blocks of steps, and how sums over states reach the lane
// of their token. No states, and no kernel.
//
// A Shape tells LANES (of a channel), TEAMS (channels at once), STEPS (of a block), OWN (of a lane)
// and PITCH (of pairs in shared memory).

// The tokens of a lane that owns neighbouring steps of its channel, where these are dense in time
// and aligned. While a block of steps is walked (now), the one before is gated and stored (done),
// and the one after arrives and gets its dt' at the end (next). All of a lane's steps exist or
// none.
template <typename Params, typename T, typename Shape> struct VectorTokens {
    static constexpr int OWN = Shape::OWN, STEPS = Shape::STEPS;
    const T *x, *dt, *z;
    T *out; // one block behind
    u32 x_next[OWN], dt_next[OWN], x_now[OWN], z_now[OWN], x_done[OWN], z_done[OWN];
    float y_done[OWN];
    float bias, skip;
    int first; // the lane's first step in a block
    bool active;

    __device__ __forceinline__ void begin(const Params &p, i64 row, i64 team_channel, i64 end,
                                          int first_step, int lane) {
        const i64 wanted = team_channel + lane / Shape::LANES;
        active = wanted < end;
        const i64 number = active ? wanted : end - 1;
        first = lane % Shape::LANES * OWN;
        const i64 start = first_step + first;
        x = static_cast<const T *>(p.x) + row * p.x_batch_stride + number * p.x_dim_stride + start;
        dt = static_cast<const T *>(p.dt) + row * p.dt_batch_stride + number * p.dt_dim_stride +
             start;
        z = static_cast<const T *>(p.z) + row * p.z_batch_stride + number * p.z_dim_stride + start;
        out = static_cast<T *>(p.out) + row * p.out_batch_stride + number * p.out_dim_stride +
              start - STEPS;
        bias = p.dt_bias ? static_cast<const float *>(p.dt_bias)[number] : 0.0f;
        skip = p.D ? static_cast<const float *>(p.D)[number] : 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            x_done[i] = z_done[i] = z_now[i] = 0u;
            y_done[i] = 0.0f;
        }
    }

    // `left`: steps from the block's first one on.
    __device__ __forceinline__ void fetch_first(const Params &p, int left) {
        fetch_steps(dt_next, dt, 1, left - first, true);
        fetch_steps(x_next, x, 1, left - first, true);
    }
    // x and dt of the block after the one from which `left` steps are left, and z of this one.
    __device__ __forceinline__ void fetch(const Params &p, int left, bool gated) {
        x += STEPS, dt += STEPS;
        fetch_first(p, left - STEPS);
        fetch_steps(z_now, z, 1, gated ? left - first : 0, true);
        z += STEPS;
    }

    // dt' and dt' x of the next block; pairs of this warp's channels, PITCH apart.
    __device__ __forceinline__ float make_pairs(const Params &, float2 *pairs, float linear_from,
                                                int left, u32, int lane) {
        float dts[OWN], inputs[OWN], total = 0.0f;
        unpack_steps<T>(dts, dt_next, true, false);
        unpack_steps<T>(inputs, x_next, true, false);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            dts[i] = softplus_until(linear_from, dts[i] + bias);
            dts[i] = first < left ? dts[i] : 0.0f;
            inputs[i] *= dts[i];
            total += dts[i];
        }
        float2 *const target = pairs + lane / Shape::LANES * Shape::PITCH + first;
        if constexpr (OWN % 2 == 0) {
#pragma unroll
            for (int i = 0; i < OWN; i += 2) {
                *reinterpret_cast<float4 *>(target + i) =
                    make_float4(dts[i], inputs[i], dts[i + 1], inputs[i + 1]);
            }
        } else {
            target[0] = make_float2(dts[0], inputs[0]);
        }
        return total;
    }

    // Gates and stores the block that is done.
    __device__ __forceinline__ void finish(const Params &p, int left, u32, const float *) {
        float values[OWN], gates[OWN];
        unpack_steps<T>(values, x_done, true, false);
        unpack_steps<T>(gates, z_done, true, false);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const float gate = p.z != nullptr ? gates[i] * sigmoid(gates[i]) : 1.0f;
            values[i] = fmaf(skip, values[i], y_done[i]) * gate;
        }
        put_steps(out, 1, values, active ? left - first : 0, true);
        out += STEPS;
    }

    __device__ __forceinline__ void shift(const float (&y)[STEPS], float *, int) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            x_done[i] = x_now[i], x_now[i] = x_next[i], z_done[i] = z_now[i], y_done[i] = y[i];
        }
    }
};

// The same for any strides, marks and either direction: a lane takes single (channel, step) items
// of its warp's channels, dealt out such that neighbouring lanes are neighbours in memory. Sums
// reach the lanes that store them through shared memory, in the place of pairs that were walked.
template <typename Params, typename T, typename Shape> struct SingleTokens {
    static constexpr int OWN = Shape::OWN, STEPS = Shape::STEPS, TEAMS = Shape::TEAMS;
    const T *x, *dt, *z; // of item 0; the launcher gives the way to the next
    T *out;
    u32 x_next[OWN], dt_next[OWN], x_now[OWN], z_now[OWN], x_done[OWN], z_done[OWN];
    float bias[OWN], skip[OWN];
    int team, step;   // of item 0
    u32 with_channel; // bit i: item i has a channel

    __device__ __forceinline__ void begin(const Params &p, i64 row, i64 team_channel, i64 end,
                                          int first_step, int lane) {
        const bool time_first = p.item_teams != 0;
        team = time_first ? lane / STEPS : lane % TEAMS;
        step = time_first ? lane % STEPS : lane / TEAMS;
        const i64 number = team_channel + team, start = first_step + step;
        x = static_cast<const T *>(p.x) + row * p.x_batch_stride + number * p.x_dim_stride +
            start * p.x_seqlen_stride;
        dt = static_cast<const T *>(p.dt) + row * p.dt_batch_stride + number * p.dt_dim_stride +
             start * p.dt_seqlen_stride;
        z = static_cast<const T *>(p.z) + row * p.z_batch_stride + number * p.z_dim_stride +
            start * p.z_seqlen_stride;
        out = static_cast<T *>(p.out) + row * p.out_batch_stride + number * p.out_dim_stride +
              (start - STEPS) * p.out_seqlen_stride;
        with_channel = 0u;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const i64 channel = number + i * p.item_teams;
            const bool exists = channel < end;
            with_channel |= exists ? 1u << i : 0u;
            bias[i] = exists && p.dt_bias ? static_cast<const float *>(p.dt_bias)[channel] : 0.0f;
            skip[i] = exists && p.D ? static_cast<const float *>(p.D)[channel] : 0.0f;
            x_done[i] = z_done[i] = z_now[i] = 0u;
        }
    }

    __device__ __forceinline__ int step_of(const Params &p, int i) const {
        return step + i * static_cast<int>(p.item_steps);
    }
    __device__ __forceinline__ int place_of(const Params &p, int i) const {
        return (team + i * static_cast<int>(p.item_teams)) * Shape::PITCH;
    }
    // The items that have a channel and lie within `left` steps.
    __device__ __forceinline__ u32 live(const Params &p, int left) const {
        u32 bits = with_channel;
        if (left < STEPS) {
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                bits &= step_of(p, i) < left ? ~0u : ~(1u << i);
            }
        }
        return bits;
    }
    static __device__ __forceinline__ void fetch_items(u32 (&raw)[OWN], const T *from, i64 stride,
                                                       u32 items) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            raw[i] = 0u;
            if (items >> i & 1u) {
                raw[i] = load_bits(from + i * stride);
            }
        }
    }

    __device__ __forceinline__ void fetch_first(const Params &p, int left) {
        const u32 items = live(p, left);
        fetch_items(dt_next, dt, p.dt_item_stride, items);
        fetch_items(x_next, x, p.x_item_stride, items);
    }
    __device__ __forceinline__ void fetch(const Params &p, int left, bool gated) {
        x += STEPS * p.x_seqlen_stride, dt += STEPS * p.dt_seqlen_stride;
        fetch_first(p, left - STEPS);
        fetch_items(z_now, z, p.z_item_stride, gated ? live(p, left) : 0u);
        z += STEPS * p.z_seqlen_stride;
    }

    __device__ __forceinline__ float make_pairs(const Params &p, float2 *pairs, float linear_from,
                                                int left, u32 padding, int) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int at = step_of(p, i);
            const bool exists = at < left && (padding >> at & 1u) == 0u;
            const float value = softplus_until(linear_from, from_bits<T>(dt_next[i]) + bias[i]);
            const float input = value * from_bits<T>(x_next[i]);
            pairs[place_of(p, i) + at] = make_float2(exists ? value : 0.0f, exists ? input : 0.0f);
        }
        return 0.0f;
    }

    // `sums`: where shift put them.
    __device__ __forceinline__ void finish(const Params &p, int left, u32 padding,
                                           const float *sums) {
        const u32 items = live(p, left);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int at = step_of(p, i);
            const float z_value = from_bits<T>(z_done[i]);
            const float gate = p.z != nullptr ? z_value * sigmoid(z_value) : 1.0f;
            const float sum = sums[2 * place_of(p, i) + at];
            float value = fmaf(skip[i], from_bits<T>(x_done[i]), sum) * gate;
            value = padding >> at & 1u ? 0.0f : value;
            if (items >> i & 1u) {
                out[i * p.out_item_stride] = from_float<T>(value);
            }
        }
        out += STEPS * p.out_seqlen_stride;
    }

    __device__ __forceinline__ void shift(const float (&y)[STEPS], float *sums, int lane) {
        float *const target =
            sums + lane / Shape::LANES * 2 * Shape::PITCH + lane % Shape::LANES * OWN;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            target[i] = y[i];
            x_done[i] = x_now[i], x_now[i] = x_next[i], z_done[i] = z_now[i];
        }
    }
};

template <bool VECTOR, typename Params, typename T, typename Shape> struct TokensOf {
    using type = SingleTokens<Params, T, Shape>;
};
template <typename Params, typename T, typename Shape> struct TokensOf<true, Params, T, Shape> {
    using type = VectorTokens<Params, T, Shape>;
};

// Adds the lanes' parts of step `done` as soon as that can be: of each pair of steps half a block
// apart, the lower lanes keep the first and the upper lanes the second, and so on by halves.
template <int LANES, int STEPS>
__device__ __forceinline__ void share_out(float (&y)[STEPS], int done, int own) {
    int half = STEPS / 2;
#pragma unroll
    for (int mask = LANES / 2; mask >= 1; mask /= 2) {
        if (done < half) {
            return;
        }
        done -= half;
        const bool upper = (own & mask) != 0;
        const float given = upper ? y[done] : y[done + half];
        const float kept = upper ? y[done + half] : y[done];
        y[done] = kept + __shfl_xor_sync(0xffffffffu, given, mask);
        half /= 2;
    }
}

// The same for one step at a time, which may be known at run time only.
template <int LANES, int OWN, int STEPS>
__device__ __forceinline__ void keep_sum(float (&y)[STEPS], float sum, int step, int own) {
#pragma unroll
    for (int mask = LANES / 2; mask >= 1; mask /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        y[i] = step == own * OWN + i ? sum : y[i];
    }
}
