// SPDX-License-Identifier: Apache-2.0
// The steps of a tile of the backward scan: forward from a saved state, and back with the gradient.

template <typename Params, typename T, int STATES, bool LARGE, bool PACKED, int CONSTANT,
          bool SUMMARY, int PARTS, bool VECTOR>
struct BackwardSteps
    : BackwardTokens<Params, T, STATES, LARGE, PACKED, CONSTANT, SUMMARY, PARTS, VECTOR> {
    using Base = BackwardTokens<Params, T, STATES, LARGE, PACKED, CONSTANT, SUMMARY, PARTS, VECTOR>;
    using Base::Base;
    using Base::block;
    using Base::carry;
    using Base::CONSTANT_B;
    using Base::CONSTANT_C;
    using Base::dA;
    using Base::fixed_B;
    using Base::fixed_C;
    using Base::fixed_dB;
    using Base::fixed_dC;
    using Base::lane;
    using Base::load_state;
    using Base::meet;
    using Base::p;
    using Base::rate;
    using Base::row;
    using Base::s;
    using Base::select;
    using Base::store_state;
    using Base::thread;
    using Base::warp;

    __device__ __forceinline__ void read_B(float (&values)[STATES], int step) const {
        if constexpr (CONSTANT_B) {
#pragma unroll
            for (int i = 0; i < STATES; i++) {
                values[i] = fixed_B[i];
            }
        } else {
            read_states<STATES>(values, &block.B[step][warp * STATES]);
        }
    }
    __device__ __forceinline__ void read_C(float (&values)[STATES], int step) const {
        if constexpr (CONSTANT_C) {
#pragma unroll
            for (int i = 0; i < STATES; i++) {
                values[i] = fixed_C[i];
            }
        } else {
            read_states<STATES>(values, &block.C[step][warp * STATES]);
        }
    }

    // What a marked step does to the state before it.
    __device__ __forceinline__ void begin_sequence(float (&state)[STATES], u32 mark) const {
        if (mark & MARK_START) {
            if ((mark & MARK_INITIAL) && p.initial_states != nullptr) {
                load_state(state, p.initial_states, mark_state(mark, row));
            } else {
#pragma unroll
                for (int i = 0; i < STATES; i++) {
                    state[i] = 0.0f;
                }
            }
        }
    }

    // The state before the chunk.
    __device__ __forceinline__ void chunk_start(float (&state)[STATES], i64 chunk) const {
        if (chunk > 0) {
            load_state(state, p.chunk_states, row * p.num_chunks + chunk);
        } else {
            load_state(state, PACKED ? nullptr : p.initial_states, row);
        }
    }

    // Forward over `count` times SUB steps of the tile; keeps the states between if asked.
    template <bool KEEP> __device__ __forceinline__ void walk(float (&state)[STATES], int count) {
#pragma unroll 1
        for (int sub = 0;; sub++) {
            if constexpr (KEEP) {
                write_states<STATES>(&s.starts[sub][thread * STATES], state);
            }
            if (sub == count) {
                break;
            }
#pragma unroll
            for (int half = 0; half < SUB; half += 4) {
                float dt[4], input[4];
                read_states<4>(dt, &s.dt[lane][sub * SUB + half]);
                read_states<4>(input, &s.input[lane][sub * SUB + half]);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int step = sub * SUB + half + j;
                    float B[STATES];
                    read_B(B, step);
                    if constexpr (PACKED) {
                        begin_sequence(state, block.marks[step]);
                    }
#pragma unroll
                    for (int i = 0; i < STATES; i++) {
                        state[i] = exp2_approx(dt[j] * rate[i]) * state[i] + input[j] * B[i];
                    }
                }
            }
        }
    }

    // The eight steps from `sub` times SUB on.
    __device__ __forceinline__ void walk_back(int sub, bool first_group) {
        float states[SUB][STATES], decays[SUB][STATES];
        bool by_shuffles = false;
        {
            float last[STATES];
            read_states<STATES>(last, &s.starts[sub][thread * STATES]);
#pragma unroll
            for (int half = 0; half < SUB; half += 4) {
                float dt[4], input[4];
                read_states<4>(dt, &s.dt[lane][sub * SUB + half]);
                read_states<4>(input, &s.input[lane][sub * SUB + half]);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int step = sub * SUB + half + j;
                    float B[STATES];
                    read_B(B, step);
                    if constexpr (PACKED) {
                        const u32 mark = block.marks[step];
                        by_shuffles = by_shuffles || mark != 0u;
                        begin_sequence(last, mark);
                    }
#pragma unroll
                    for (int i = 0; i < STATES; i++) {
                        const float decay = exp2_approx(dt[j] * rate[i]);
                        last[i] = decay * last[i] + input[j] * B[i];
                        decays[half + j][i] = decay;
                        states[half + j][i] = last[i];
                    }
                }
            }
        }
        const int stripe_step = (sub * SUB) % STRIPE;
#pragma unroll
        for (int half = SUB - 4; half >= 0; half -= 4) {
            ChannelSums<STATES> sums;
            float dt[2], input[2], dy[2];
            read_pair(dt, input, dy, sub, stripe_step, half + 2);
            meet();
#pragma unroll
            for (int pair = 2; pair >= 0; pair -= 2) {
                const int place = half + pair;
                float y[2], sum_B[2], sum_A[2];
                if (pair == 0) {
                    read_pair(dt, input, dy, sub, stripe_step, place);
                }
#pragma unroll
                for (int j = 1; j >= 0; j--) {
                    step_back(sub, place + j, dt[j], input[j], dy[j], states, decays, y[j],
                              sum_B[j], sum_A[j], sums, by_shuffles);
                    if constexpr (CONSTANT != 3) {
                        sums.leave(place + j, s.tables[warp]);
                    }
                }
                s.sums[0][warp][pair / 2][lane] = make_float2(y[0], y[1]);
                s.sums[1][warp][pair / 2][lane] = make_float2(sum_B[0], sum_B[1]);
                s.sums[2][warp][pair / 2][lane] = make_float2(sum_A[0], sum_A[1]);
            }
            meet();
            if (warp < 3) {
                add_states(sub * SUB + half, stripe_step + half, first_group);
            } else if constexpr (CONSTANT != 3) {
                ChannelSums<STATES>::add_groups(s.tables, s.channel_sums, stripe_step + half);
            }
        }
    }

    __device__ __forceinline__ void read_pair(float (&dt)[2], float (&input)[2], float (&dy)[2],
                                              int sub, int stripe_step, int place) const {
        read_states<2>(dt, &s.dt[lane][sub * SUB + place]);
        read_states<2>(input, &s.input[lane][sub * SUB + place]);
        read_states<2>(dy, &s.dy[lane][(LARGE ? sub * SUB : stripe_step) + place]);
    }

    __device__ __forceinline__ void step_back(int sub, int place, float dt, float input, float dy,
                                              const float (&states)[SUB][STATES],
                                              const float (&decays)[SUB][STATES], float &y,
                                              float &sum_B, float &sum_A, ChannelSums<STATES> &sums,
                                              bool by_shuffles) {
        const int step = sub * SUB + place;
        float B[STATES], C[STATES], previous[STATES];
        read_B(B, step);
        read_C(C, step);
        if (place > 0) {
#pragma unroll
            for (int i = 0; i < STATES; i++) {
                previous[i] = states[place - 1][i];
            }
        } else {
            read_states<STATES>(previous, &s.starts[sub][thread * STATES]);
        }
        u32 mark = 0u;
        if constexpr (PACKED) {
            mark = block.marks[step];
            begin_sequence(previous, mark);
            if (mark & MARK_END) {
                load_state(carry, mark & MARK_FINAL ? p.dfinal_states : nullptr,
                           mark_state(mark, row));
            }
        }
        y = 0.0f, sum_B = 0.0f, sum_A = 0.0f;
#pragma unroll
        for (int i = 0; i < STATES; i++) {
            const float state = states[place][i];
            const float gradient = C[i] * dy + carry[i];
            y += C[i] * state;
            sum_B += gradient * B[i];
            const float dB = gradient * input, dC = state * dy;
            carry[i] = decays[place][i] * gradient;
            const float exponent = carry[i] * previous[i];
            sum_A += rate[i] * exponent;
            dA[i] += dt * exponent;
            if constexpr (CONSTANT_B) {
                fixed_dB[i] += dB;
            }
            if constexpr (CONSTANT_C) {
                fixed_dC[i] += dC;
            }
            if constexpr (CONSTANT != 3) {
                sums.add(place, i, dB, dC, select, PACKED && by_shuffles);
            }
        }
        if constexpr (PACKED) {
            if (mark & MARK_START) {
                if ((mark & MARK_INITIAL) && p.dinitial_states != nullptr) {
                    store_state(p.dinitial_states, mark_state(mark, row), carry);
                }
#pragma unroll
                for (int i = 0; i < STATES; i++) {
                    carry[i] = 0.0f;
                }
            }
        }
    }

    // Adds up what the warps left of 4 steps; each warp one of the three sums.
    __device__ __forceinline__ void add_states(int tile_step, int stripe_step, bool first_group) {
        const float2 first = s.sums[warp][0][0][lane], second = s.sums[warp][0][1][lane];
        float4 total = make_float4(first.x, first.y, second.x, second.y);
#pragma unroll
        for (int other = 1; other < WARPS; other++) {
            const float2 more = s.sums[warp][other][0][lane], last = s.sums[warp][other][1][lane];
            total.x += more.x, total.y += more.y, total.z += last.x, total.w += last.y;
        }
        float *target;
        if constexpr (LARGE) {
            target = warp == 0   ? &s.y[lane][tile_step]
                     : warp == 1 ? &s.sum_B[lane][tile_step]
                                 : &s.sum_A[lane][tile_step];
        } else {
            target = warp == 0   ? &s.dy[lane][stripe_step]
                     : warp == 1 ? &s.input[lane][tile_step]
                                 : &s.sum_A[lane][stripe_step];
        }
        if (LARGE && !first_group) {
            const float4 more = *reinterpret_cast<float4 *>(target);
            total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
        }
        *reinterpret_cast<float4 *>(target) = total;
    }
};
