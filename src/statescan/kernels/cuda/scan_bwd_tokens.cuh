// SPDX-License-Identifier: Apache-2.0
// The tokens of a tile of the backward scan: on their way in, dt', dt' x and dy; on their way out,
// the gradients of x, dt and z, and the block's part of those of B and C.

template <typename Params, typename T, int STATES, bool LARGE, bool PACKED, int CONSTANT,
          bool SUMMARY, int PARTS, bool VECTOR>
struct BackwardTokens
    : BackwardBlock<Params, T, STATES, LARGE, PACKED, CONSTANT, SUMMARY, PARTS, VECTOR> {
    using Base = BackwardBlock<Params, T, STATES, LARGE, PACKED, CONSTANT, SUMMARY, PARTS, VECTOR>;
    using Base::Base;
    using Base::bias;
    using Base::block;
    using Base::CONSTANT_B;
    using Base::CONSTANT_C;
    using Base::EACH;
    using Base::fetch;
    using Base::fetch_weights;
    using Base::first_state;
    using Base::is_padding;
    using Base::left;
    using Base::own_channel;
    using Base::own_step;
    using Base::own_sum;
    using Base::p;
    using Base::prefetch;
    using Base::put;
    using Base::put_weights;
    using Base::row;
    using Base::s;
    using Base::skip;
    using Base::unpack_quad;

    // The activations of a tile: dt' and dt' x, and dy of one stripe, or of all.
    __device__ __forceinline__ void load_tile(int last_stripe, i64 start, i64 chunk) {
        u32 raw_B[EACH][4], raw_C[EACH][4];
        if constexpr (!LARGE) {
            fetch_weights(raw_B, raw_C, start);
        }
        constexpr bool ALL = LARGE || SUMMARY;
        u32 raw_dt[4][4], raw_x[4][4], raw_dout[4], raw_z[4];
#pragma unroll
        for (int stripe = 0; stripe < 4; stripe++) {
            fetch(raw_dt[stripe], DT, stripe * STRIPE + own_step);
            if constexpr (!SUMMARY) {
                fetch(raw_x[stripe], X, stripe * STRIPE + own_step);
            }
        }
        if constexpr (!ALL) {
            fetch_gradient(raw_dout, raw_z, last_stripe);
        }
        prefetch(start, chunk);
        if constexpr (!LARGE) {
            put_weights(raw_B, raw_C);
        }
        const float dt_bias = bias();
#pragma unroll
        for (int stripe = 0; stripe < 4; stripe++) {
            const int step = stripe * STRIPE + own_step, valid = left(step);
            float dt[4], x[4];
            unpack_quad(dt, raw_dt[stripe]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dt[i] += dt_bias;
            }
            if (p.dt_softplus) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    dt[i] = softplus(dt[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dt[i] = is_real(i, valid, step) ? dt[i] : 0.0f;
            }
            *reinterpret_cast<float4 *>(&s.dt[own_channel][step]) =
                make_float4(dt[0], dt[1], dt[2], dt[3]);
            if constexpr (!SUMMARY) {
                unpack_quad(x, raw_x[stripe]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    x[i] = dt[i] * (is_padding(step + i) ? 0.0f : x[i]);
                }
                *reinterpret_cast<float4 *>(&s.input[own_channel][step]) =
                    make_float4(x[0], x[1], x[2], x[3]);
            }
        }
        if constexpr (ALL) {
#pragma unroll 1
            for (int stripe = 0; stripe < TILE; stripe += STRIPE) {
                fetch_gradient(raw_dout, raw_z, stripe);
                put_gradient(raw_dout, raw_z, stripe);
            }
        } else {
            put_gradient(raw_dout, raw_z, last_stripe);
        }
    }
    // With VECTOR, four steps are there together or not at all.
    __device__ __forceinline__ bool is_real(int i, int valid, int tile_step) const {
        return (VECTOR ? valid > 0 : i < valid) && !is_padding(tile_step + i);
    }

    // dy = dout silu(z) of a stripe.
    __device__ __forceinline__ void fetch_gradient(u32 (&raw)[4], u32 (&raw_z)[4], int stripe,
                                                   bool wanted = true) const {
        fetch(raw, DOUT, stripe + own_step, wanted);
        fetch(raw_z, Z, stripe + own_step, wanted && p.z != nullptr);
    }
    __device__ __forceinline__ void put_gradient(const u32 (&raw)[4], const u32 (&raw_z)[4],
                                                 int stripe) {
        const int at = stripe + own_step;
        float dy[4], z[4];
        unpack_quad(dy, raw);
        if (p.z != nullptr) {
            unpack_quad(z, raw_z);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dy[i] *= z[i] * sigmoid(z[i]);
            }
        }
        if constexpr (PACKED) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dy[i] = is_padding(at + i) ? 0.0f : dy[i];
            }
        }
        *reinterpret_cast<float4 *>(&s.dy[own_channel][LARGE || SUMMARY ? at : own_step]) =
            make_float4(dy[0], dy[1], dy[2], dy[3]);
    }

    // Ends a stripe: when all have met, dB and dC to the workspace, the gradients of x, dt and z to
    // their places, and dy of the stripe before.
    __device__ __forceinline__ void finish(i64 start, int stripe) {
        const int at = stripe + own_step;
        u32 raw_x[4], raw_dt[4], raw_dout[4], raw_z[4], next_dout[4], next_z[4];
        fetch(raw_x, X, at);
        fetch(raw_dt, DT, at);
        fetch_gradient(raw_dout, raw_z, stripe);
        const bool more = !LARGE && stripe > 0;
        fetch_gradient(next_dout, next_z, stripe - STRIPE, more);
        if constexpr (!LARGE) {
            __syncthreads();
            if constexpr (CONSTANT != 3) {
                flush(start + stripe);
            }
        }
        store_gradients(at, raw_x, raw_dt, raw_dout, raw_z);
        if (more) {
            put_gradient(next_dout, next_z, stripe - STRIPE);
            __syncthreads();
        }
    }
    __device__ __forceinline__ void store_gradients(int at, const u32 (&raw_x)[4],
                                                    const u32 (&raw_dt)[4],
                                                    const u32 (&raw_dout)[4],
                                                    const u32 (&raw_z)[4]) {
        const float skip = Base::skip(), dt_bias = bias();
        const int valid = left(at), late = LARGE ? at : own_step;
        float x[4], dt[4], dy[4], sum_B[4], others[4];
        unpack_quad(x, raw_x);
        unpack_quad(dt, raw_dt);
        unpack_quad(dy, raw_dout);
        if constexpr (PACKED) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[i] = is_padding(at + i) ? 0.0f : x[i];
                dy[i] = is_padding(at + i) ? 0.0f : dy[i];
            }
        }
        if (p.z != nullptr) {
            float z[4], dz[4];
            unpack_quad(z, raw_z);
            if constexpr (LARGE) {
                read_states<4>(others, &s.y[own_channel][at]);
            } else {
                read_states<4>(others, &s.dy[own_channel][own_step]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                z[i] = is_padding(at + i) ? 0.0f : z[i];
                const float gate = sigmoid(z[i]), scaled = dy[i] * gate;
                dy[i] = scaled * z[i];
                dz[i] = scaled * (others[i] + skip * x[i]) * (1.0f + (z[i] - z[i] * gate));
            }
            put(DZ, at, dz);
        }
        if constexpr (LARGE) {
            read_states<4>(sum_B, &s.sum_B[own_channel][at]);
        } else {
            read_states<4>(sum_B, &s.input[own_channel][at]);
        }
        read_states<4>(others, &s.dt[own_channel][at]);
        // Four tokens are added up first: one by one, sums over 131072 tokens lost half a digit.
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum += dy[i] * x[i];
            dy[i] = skip * dy[i] + others[i] * sum_B[i];
        }
        own_sum(s.dt) += sum;
        put(DX, at, dy);
        read_states<4>(others, &s.sum_A[own_channel][late]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            others[i] = x[i] * sum_B[i] + STATESCAN_LN2 * others[i];
        }
        if (p.dt_softplus) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float raw = dt[i] + dt_bias, slope = sigmoid(raw);
                others[i] *= raw > 20.0f ? 1.0f : slope;
            }
        }
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            others[i] = is_real(i, valid, at) ? others[i] : 0.0f;
            sum += others[i];
        }
        own_sum(s.input) += sum;
        put(DDT, at, others);
    }

    // dB and dC of a stripe to the workspace (block, row, state, step).
    __device__ __forceinline__ void flush(i64 step) const {
        const int which = static_cast<int>(threadIdx.x) >> 6;
        const int state = (static_cast<int>(threadIdx.x) >> 2) & 15;
        const int quad = (static_cast<int>(threadIdx.x) & 3) * 4;
        if (threadIdx.x >= THREADS || (which ? CONSTANT_C : CONSTANT_B) ||
            first_state + state >= p.dstate) {
            return;
        }
        const i64 number = blockIdx.x % static_cast<u32>(p.blocks_per_row);
        float *target = which ? p.part_dC : p.part_dB;
        target += ((number * p.batch + row) * p.dstate + first_state + state) * p.part_steps +
                  step + quad;
        float4 total =
            *reinterpret_cast<const float4 *>(&block.parts[0].channel_sums[which][state][quad]);
#pragma unroll
        for (int other = 1; other < PARTS; other++) {
            const float4 more = *reinterpret_cast<const float4 *>(
                &block.parts[other].channel_sums[which][state][quad]);
            total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
        }
        *reinterpret_cast<float4 *>(target) = total;
    }
};
