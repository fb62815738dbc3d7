// SPDX-License-Identifier: Apache-2.0
// Gradients of the selective scan.
//
// With h the states, a = exp(dt A), u = dt x, for each channel and state n, in the order of
// processing:
//
//     g[t]  = C[t] dy[t] + w[t+1]            gradient of h[t];  w[t] = a[t] g[t]
//     dC[t] = sum over channels of h[t] dy[t]         dB[t] = sum over channels of g[t] u[t]
//     p[t]  = w[t] h[t-1]                    gradient of the exponent dt A
//     dA    = sum over tokens of dt[t] p[t]
//     dx[t] = dt[t] S + D dy[t]              S = sum over n of B[t] g[t]
//     ddt[t] = x[t] S + sum over n of A p[t]
//     dinitial = w[first], and dfinal enters as w after the last token.
//
// Grid: x counts blocks of 32 PARTS channels (fastest), segments of time and batch rows. Each part
// has 32 channels and 4 warps: a lane owns a channel, a warp STATES of its states. A block walks
// the chunks of its segment from the last to the first, in tiles of 64 steps:
//   1. dt' (bias, softplus) and u of the tile go to shared memory, B and C beside them.
//   2. From the state saved at the tile's start a walk forward leaves the state before each eighth
//      step in shared memory (one exponential a step and state).
//   3. From the last to the first, eight steps at a time: forward with all states and decays kept
//      in registers (the second exponential), then back. Sums over states go through shared
//      memory, 4 steps at a time; sums over channels through the matrix unit, see ChannelSums.
//   4. Each 16 steps the gradients of x, dt and z are finished and stored, and dB and dC of the
//      block's channels go to the workspace, which selective_scan_reduce adds up in a fixed order.
// With more than 16 states, 2 and 3 run for 16 of them after the other (LARGE); chunks are longer
// than a tile then, and one more walk finds the states at the tiles' starts.
//
// Few channels: time is cut into segments that run at once. A first launch (SUMMARY) walks
// all but the first of them back from zero, for what each hands to those before it.
//
// Instances: VECTOR takes four neighbouring steps of a channel at once, others any strides and
// either direction; PACKED minds marks, and takes a row without them for one sequence; CONSTANT has
// bit 0 for B and bit 1 for C that do not depend on the token. Whatever the order in which blocks
// run, each sum has one order: equal bits on every run.

template <typename T, int STATES, bool LARGE, bool PACKED, int CONSTANT, bool SUMMARY, int PARTS,
          bool VECTOR>
struct Backward : BackwardSteps<SelectiveScanBwdParams, T, STATES, LARGE, PACKED, CONSTANT, SUMMARY,
                                PARTS, VECTOR> {
    using Base = BackwardSteps<SelectiveScanBwdParams, T, STATES, LARGE, PACKED, CONSTANT, SUMMARY,
                               PARTS, VECTOR>;
    using Shared = typename Base::Shared;
    using Base::Base;
    using Base::block;
    using Base::carry;
    using Base::channels;
    using Base::chunk_start;
    using Base::CONSTANT_B;
    using Base::CONSTANT_C;
    using Base::dA;
    using Base::enter_tile;
    using Base::finish;
    using Base::first_channel;
    using Base::first_state;
    using Base::fixed_B;
    using Base::fixed_C;
    using Base::fixed_dB;
    using Base::fixed_dC;
    using Base::flush;
    using Base::keep_parameters;
    using Base::lane;
    using Base::load_state;
    using Base::load_tile;
    using Base::load_weights;
    using Base::own_sum;
    using Base::p;
    using Base::part;
    using Base::place;
    using Base::rate;
    using Base::read_C;
    using Base::row;
    using Base::s;
    using Base::segment;
    using Base::select;
    using Base::store_state;
    using Base::walk_back;
    using Base::warp;

    // Everything of 16 states that lasts longer than a tile.
    __device__ __forceinline__ void load_group() {
        load_state(rate, p.A, 0);
#pragma unroll
        for (int i = 0; i < STATES; i++) {
            rate[i] *= STATESCAN_LOG2E;
        }
        if constexpr (CONSTANT_B) {
            load_state(fixed_B, static_cast<const float *>(p.B), 0);
        }
        if constexpr (CONSTANT_C) {
            load_state(fixed_C, static_cast<const float *>(p.C), 0);
        }
    }
    __device__ __forceinline__ i64 own_part() const {
        return row * p.num_segments + segment;
    }
    __device__ __forceinline__ void load_sums() {
        load_state(dA, p.part_dA, own_part());
        if constexpr (CONSTANT_B) {
            load_state(fixed_dB, p.part_dB, own_part());
        }
        if constexpr (CONSTANT_C) {
            load_state(fixed_dC, p.part_dC, own_part());
        }
    }
    __device__ __forceinline__ void clear_sums() {
#pragma unroll
        for (int i = 0; i < STATES; i++) {
            dA[i] = 0.0f, fixed_dB[i] = 0.0f, fixed_dC[i] = 0.0f;
        }
    }
    __device__ __forceinline__ void store_sums() const {
        store_state(p.part_dA, own_part(), dA);
        if constexpr (CONSTANT_B) {
            store_state(p.part_dB, own_part(), fixed_dB);
        }
        if constexpr (CONSTANT_C) {
            store_state(p.part_dC, own_part(), fixed_dC);
        }
    }
    // What comes from the segments after this one.
    __device__ __forceinline__ void first_carry() {
        load_state(carry, p.marks == nullptr ? p.dfinal_states : nullptr, row);
        for (i64 later = p.num_segments - 1; later > segment; later--) {
            const i64 part = row * p.num_segments + later;
            float local[STATES];
            load_state(local, p.local_carries, part);
            const float sum_dt =
                lane < channels ? p.sums_dt[part * p.dim + first_channel + lane] : 0.0f;
#pragma unroll
            for (int i = 0; i < STATES; i++) {
                // NaN says that a sequence begins there.
                const float decay = sum_dt == sum_dt ? exp2_approx(sum_dt * rate[i]) : 0.0f;
                carry[i] = local[i] + decay * carry[i];
            }
        }
    }

    __device__ __forceinline__ float *tile_state(i64 tile) const {
        const i64 groups = (p.dstate + GROUP - 1) / GROUP;
        return p.tile_states +
               ((static_cast<i64>(blockIdx.x) * p.tiles_per_chunk + tile) * groups * THREADS +
                (first_state / GROUP) * THREADS + threadIdx.x) *
                   STATES;
    }

    // States at the starts of a chunk's tiles but the first.
    __device__ __forceinline__ void find_tile_starts(i64 chunk, i64 tiles) {
        for (i64 tile = 0; tile + 1 < tiles; tile++) {
            const i64 start = (chunk * p.tiles_per_chunk + tile) * TILE;
            __syncthreads();
            enter_tile(start);
            load_tile(0, start, 0);
            for (first_state = 0; first_state < p.dstate; first_state += GROUP) {
                load_group();
                __syncthreads();
                load_weights(start);
                __syncthreads();
                float state[STATES];
                if (tile == 0) {
                    chunk_start(state, chunk);
                } else {
#pragma unroll
                    for (int i = 0; i < STATES; i++) {
                        state[i] = tile_state(tile)[i];
                    }
                }
                this->template walk<false>(state, TILE / SUB);
#pragma unroll
                for (int i = 0; i < STATES; i++) {
                    tile_state(tile + 1)[i] = state[i];
                }
            }
        }
    }

    // Steps 2 and 3 for the states of the group, and 4 as well unless LARGE.
    __device__ __forceinline__ void do_tile(i64 start, int steps, float (&state)[STATES]) {
        const int subs = (steps + SUB - 1) / SUB;
        this->template walk<true>(state, subs - 1);
        int sub = subs - 1;
#pragma unroll 1
        for (int stripe = sub / 2; stripe >= 0; stripe--) {
#pragma unroll 1
            for (; sub >= 2 * stripe; sub--) {
                walk_back(sub, first_state == 0);
            }
            if constexpr (LARGE) {
                __syncthreads();
                if constexpr (CONSTANT != 3) {
                    flush(start + stripe * STRIPE);
                }
            } else {
                finish(start, stripe * STRIPE);
            }
        }
    }

    // What the segment hands to those before it: its own part of the carry, and the sum of dt'.
    __device__ __forceinline__ void summarise() {
        const i64 steps_of_segment = p.segment_chunks * p.tiles_per_chunk * TILE;
        const i64 first = segment * steps_of_segment;
        i64 rest = p.seqlen - first;
        keep_parameters();
        rest = rest < steps_of_segment ? rest : steps_of_segment;
        for (first_state = 0; first_state < p.dstate; first_state += GROUP) {
            load_group();
            float sum_dt = 0.0f;
            bool restarted = false;
#pragma unroll
            for (int i = 0; i < STATES; i++) {
                carry[i] = 0.0f;
            }
            for (i64 tile = (rest + TILE - 1) / TILE - 1; tile >= 0; tile--) {
                const i64 start = first + tile * TILE;
                enter_tile(start);
                load_tile(0, start, 0);
                __syncthreads();
#pragma unroll 4
                for (int quad = TILE - 4; quad >= 0; quad -= 4) {
                    float dt[4], dy[4];
                    read_states<4>(dt, &s.dt[lane][quad]);
                    read_states<4>(dy, &s.dy[lane][quad]);
#pragma unroll
                    for (int j = 3; j >= 0; j--) {
                        float C[STATES];
                        read_C(C, quad + j);
                        u32 mark = 0u;
                        if constexpr (PACKED) {
                            mark = block.marks[quad + j];
                            if (mark & MARK_END) {
                                load_state(carry, mark & MARK_FINAL ? p.dfinal_states : nullptr,
                                           mark_state(mark, row));
                            }
                        }
#pragma unroll
                        for (int i = 0; i < STATES; i++) {
                            carry[i] = exp2_approx(dt[j] * rate[i]) * (C[i] * dy[j] + carry[i]);
                        }
                        sum_dt += dt[j];
                        if (PACKED && (mark & MARK_START)) {
                            restarted = true;
#pragma unroll
                            for (int i = 0; i < STATES; i++) {
                                carry[i] = 0.0f;
                            }
                        }
                    }
                }
                __syncthreads();
            }
            store_state(p.local_carries, own_part(), carry);
            if (warp == 0 && lane < channels) {
                p.sums_dt[own_part() * p.dim + first_channel + lane] =
                    restarted ? __int_as_float(0x7fffffff) : sum_dt;
            }
        }
    }

    __device__ __forceinline__ void run() {
        const i64 first_chunk = segment * p.segment_chunks;
        i64 last_chunk = first_chunk + p.segment_chunks;
        last_chunk = last_chunk < p.num_chunks ? last_chunk : p.num_chunks;
        ChannelSums<STATES>::make_selection(select);
        keep_parameters();
        own_sum(s.dt) = 0.0f;
        own_sum(s.input) = 0.0f;
        first_state = 0;
        if constexpr (!LARGE) {
            load_group();
            first_carry();
            clear_sums();
        }
        for (i64 chunk = last_chunk - 1; chunk >= first_chunk; chunk--) {
            const i64 chunk_steps = p.tiles_per_chunk * TILE;
            const i64 rest = p.seqlen - chunk * chunk_steps;
            const i64 tiles = ((rest < chunk_steps ? rest : chunk_steps) + TILE - 1) / TILE;
            if constexpr (LARGE) {
                find_tile_starts(chunk, tiles);
            }
            for (i64 tile = tiles - 1; tile >= 0; tile--) {
                const i64 start = chunk * chunk_steps + tile * TILE;
                const int steps =
                    static_cast<int>(p.seqlen - start < TILE ? p.seqlen - start : TILE);
                const int last_stripe = (steps - 1) / STRIPE * STRIPE;
                float state[STATES];
                if constexpr (LARGE) {
                    __syncthreads();
                    enter_tile(start);
                    load_tile(0, start, 0);
                    const bool first_visit = chunk == last_chunk - 1 && tile == tiles - 1;
                    for (first_state = 0; first_state < p.dstate; first_state += GROUP) {
                        load_group();
                        if (first_visit) {
                            first_carry();
                            clear_sums();
                        } else {
                            load_state(carry, p.carries, own_part());
                            load_sums();
                        }
                        __syncthreads();
                        load_weights(start);
                        __syncthreads();
                        if (tile == 0) {
                            chunk_start(state, chunk);
                        } else {
#pragma unroll
                            for (int i = 0; i < STATES; i++) {
                                state[i] = tile_state(tile)[i];
                            }
                        }
                        do_tile(start, steps, state);
                        store_state(p.carries, own_part(), carry);
                        store_sums();
                        end_row(chunk == 0 && tile == 0);
                    }
                    first_state = 0;
                    __syncthreads();
                    for (int step = last_stripe; step >= 0; step -= STRIPE) {
                        finish(start, step);
                    }
                } else {
                    chunk_start(state, chunk);
                    enter_tile(start);
                    load_tile(last_stripe, start, chunk);
                    __syncthreads();
                    do_tile(start, steps, state);
                }
            }
        }
        if constexpr (!LARGE) {
            store_sums();
            end_row(first_chunk == 0);
        }
        add_channel_parameters();
    }

    __device__ __forceinline__ void end_row(bool at_start) const {
        if (!PACKED && at_start && p.dinitial_states != nullptr) {
            store_state(p.dinitial_states, row, carry);
        }
    }

    // dD and ddt_bias of the block: four threads have a part of each channel's.
    __device__ __forceinline__ void add_channel_parameters() {
        __syncthreads();
        if (warp == 0 && lane < channels) {
            const float *dD = &s.dt[lane][TILE], *ddt_bias = &s.input[lane][TILE];
            const i64 place = own_part() * p.dim + first_channel + lane;
            p.part_dD[place] = (dD[0] + dD[1]) + (dD[2] + dD[3]);
            p.part_ddt_bias[place] = (ddt_bias[0] + ddt_bias[1]) + (ddt_bias[2] + ddt_bias[3]);
        }
    }
};

template <typename T, int STATES, bool LARGE, bool PACKED, int CONSTANT, bool SUMMARY, int PARTS,
          bool VECTOR>
__device__ __forceinline__ void selective_scan_bwd(const SelectiveScanBwdParams &p) {
    extern __shared__ float4 memory[];
    using Block = Backward<T, STATES, LARGE, PACKED, CONSTANT, SUMMARY, PARTS, VECTOR>;
    Block block(p, *reinterpret_cast<typename Block::Shared *>(memory));
    if constexpr (SUMMARY) {
        block.summarise();
    } else {
        block.run();
    }
}
