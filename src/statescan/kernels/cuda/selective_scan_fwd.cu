// SPDX-License-Identifier: Apache-2.0
// Forward selective scan: out, final states, and states saved on the way for the backward.
//
// Grid: x counts blocks of channels (fastest), stretches of time and batch rows; 4 warps a block.
// LANES neighbouring lanes share CHANS channels and own STATES states of each, so a warp has
// CHANS * 32 / LANES channels, all of one unit (channels that share both B and C).
//
// A warp walks time in blocks of STEPS. Each lane loads STEPS / LANES of them, makes dt' (bias,
// softplus) and dt' x once and hands both to the lanes of its channel through shared memory; all
// lanes take all steps with their states in registers; the sums over states are exchanged so that
// each lane ends with the steps that it loaded, adds D x, gates and stores. Loads of the next block
// are in flight meanwhile. Warps meet only where B and C go on to the next TILE of tokens: as
// floats in shared memory, two buffers, one barrier a tile.
//
// Per (channel, token, state): one product and one ex2 for the decay, one product for the input,
// two multiply-adds, and 2 / CHANS + 2 / STATES floats out of shared memory. Both ex2 (16 a clock
// and multiprocessor) and shared memory (32 floats a clock, however many lanes read the same one)
// bound it: with one channel of 4 states a lane the latter did, at 1.25 times the former.
//
// Few channels: time is cut into stretches that run at once. A first launch (SUMMARY) walks each of
// them from zero and leaves its last state and the sum of its dt'; the second one makes the state
// that enters a stretch of those of the stretches before it: the decay over one is exp(A sum dt').

template <int LANES_, int STATES_, int CHANS_, int STEPS_, int TILE_, int AHEAD_, int WARPS_>
struct ForwardShape {
    static constexpr int LANES = LANES_, STATES = STATES_, CHANS = CHANS_;
    static constexpr int STEPS = STEPS_, TILE = TILE_;
    static constexpr int WARPS = WARPS_, THREADS = 32 * WARPS;
    static constexpr int TEAMS = 32 / LANES;              // lanes of a warp that share channels
    static constexpr int CHANNELS = CHANS * TEAMS;        // of a warp
    static constexpr int OWN = STEPS / LANES;             // steps that a lane loads and stores
    static constexpr int WIDTH = STATES < 4 ? STATES : 4; // neighbouring states of a lane
    static constexpr int PADDED = LANES * STATES;
    static constexpr int GROUPS = PADDED < 4 ? 1 : PADDED / 4; // of 4 states
    // An odd number of 16-byte words keeps neighbouring tokens in different banks.
    static constexpr int ROW = 4 * (GROUPS | 1);
    static constexpr int PITCH = STEPS + 2;             // of dt' pairs, likewise
    static constexpr int ITEMS = TILE * GROUPS;         // of B or of C in a tile
    static constexpr int DECAYS_AHEAD = AHEAD_;         // steps
    static constexpr bool ROLLED = STATES * CHANS > 16; // too much code otherwise
    static constexpr int TILE_FLOATS = TILE * ROW;
    static constexpr int PAIR_FLOATS = 2 * CHANNELS * PITCH;
    // The states of a lane are groups of WIDTH, dealt out in turn, so that lanes read neighbours.
    static __device__ __forceinline__ int state(int own, int i) {
        return (i / WIDTH * LANES + own) * WIDTH + i % WIDTH;
    }
};

template <int COUNT>
__device__ __forceinline__ void read_floats(float (&values)[COUNT], const float *source) {
    if constexpr (COUNT == 4) {
        const float4 four = *reinterpret_cast<const float4 *>(source);
        values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
    } else if constexpr (COUNT == 2) {
        const float2 two = *reinterpret_cast<const float2 *>(source);
        values[0] = two.x, values[1] = two.y;
    } else {
        values[0] = *source;
    }
}

// A lane's states of a channel, from or to a row of states in memory.
template <typename Shape>
__device__ __forceinline__ void load_states(float (&values)[Shape::STATES], const float *source,
                                            int own, i64 dstate) {
#pragma unroll
    for (int i = 0; i < Shape::STATES; i++) {
        const int state = Shape::state(own, i);
        values[i] = source != nullptr && state < dstate ? source[state] : 0.0f;
    }
}
template <typename Shape>
__device__ __forceinline__ void store_states(float *target, const float (&values)[Shape::STATES],
                                             int own, i64 dstate, bool vectors) {
    constexpr int WIDTH = Shape::WIDTH;
#pragma unroll
    for (int i = 0; i < Shape::STATES; i += WIDTH) {
        const int state = Shape::state(own, i);
        if (WIDTH == 4 && vectors) {
            if (state < dstate) {
                *reinterpret_cast<float4 *>(target + state) =
                    make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                if (state + j < dstate) {
                    target[state + j] = values[i + j];
                }
            }
        }
    }
}

// The states that a lane owns of a channel.
template <typename Shape, bool CONSTANT> struct ChannelStates {
    static constexpr int STATES = Shape::STATES;
    float h[STATES], rate[STATES];
    float B[CONSTANT ? STATES : 1], C[CONSTANT ? STATES : 1];
    float span_dt;
    i64 number;
    bool active;

    __device__ __forceinline__ void begin(const SelectiveScanFwdParams &p, i64 wanted, i64 end,
                                          int own) {
        active = wanted < end;
        number = active ? wanted : end - 1;
        span_dt = 0.0f;
        const i64 at = number * p.state_row;
        load_states<Shape>(rate, static_cast<const float *>(p.A) + at, own, p.dstate);
#pragma unroll
        for (int i = 0; i < STATES; i++) {
            rate[i] *= STATESCAN_LOG2E;
        }
        if constexpr (CONSTANT) {
            load_states<Shape>(B, p.B_constant ? static_cast<const float *>(p.B) + at : nullptr,
                               own, p.dstate);
            load_states<Shape>(C, p.C_constant ? static_cast<const float *>(p.C) + at : nullptr,
                               own, p.dstate);
        }
    }

    // The state with which a stretch of time begins.
    __device__ __forceinline__ void enter(const SelectiveScanFwdParams &p, const float *initial,
                                          i64 row, u32 stretch, int own) {
        load_states<Shape>(h, initial, own, p.dstate);
        const float *ends = static_cast<const float *>(p.workspace);
        const float2 *spans = reinterpret_cast<const float2 *>(ends + p.batch * p.num_stretches *
                                                                          p.dim * Shape::PADDED);
        i64 entry = row * p.num_stretches * p.dim + number;
        for (u32 before = 0; before < stretch; before++, entry += p.dim) {
            const float2 span = spans[entry];
            float end[STATES];
            load_states<Shape>(end, ends + entry * Shape::PADDED, own, Shape::PADDED);
#pragma unroll
            for (int i = 0; i < STATES; i++) {
                // A sequence began within the stretch if span.y is 0: nothing passes through it.
                const float passed = exp2_approx(span.x * rate[i]) * h[i];
                h[i] = span.y != 0.0f ? passed + end[i] : end[i];
            }
        }
    }

    __device__ __forceinline__ void leave_summary(const SelectiveScanFwdParams &p, i64 row,
                                                  u32 stretch, int own, float open) const {
        float *ends = static_cast<float *>(p.workspace);
        float2 *spans =
            reinterpret_cast<float2 *>(ends + p.batch * p.num_stretches * p.dim * Shape::PADDED);
        const i64 entry = (row * p.num_stretches + stretch) * p.dim + number;
        if (active) {
            store_states<Shape>(ends + entry * Shape::PADDED, h, own, Shape::PADDED, true);
            if (own == 0) {
                spans[entry] = make_float2(span_dt, open);
            }
        }
    }

    __device__ __forceinline__ void store(const SelectiveScanFwdParams &p, void *states, i64 entry,
                                          int own) const {
        if (active) {
            float *target = static_cast<float *>(states) + (entry * p.dim + number) * p.state_row;
            store_states<Shape>(target, h, own, p.dstate, p.vector_states != 0);
        }
    }
};

// The decays of one step of all channels of a lane.
template <typename Shape, typename Lane>
__device__ __forceinline__ void make_decays(float (&decays)[Shape::CHANS][Shape::STATES],
                                            const Lane (&lanes)[Shape::CHANS],
                                            const float2 (&pairs)[Shape::CHANS], float shift) {
#pragma unroll
    for (int k = 0; k < Shape::CHANS; k++) {
#pragma unroll
        for (int i = 0; i < Shape::STATES; i++) {
            decays[k][i] = exp2_approx(fmaf(pairs[k].x, lanes[k].rate[i], shift));
        }
    }
}

// One step of all channels of a lane, from its decays; `sums` are its parts of the sums over
// states.
template <bool SUMMARY, bool CONSTANT, typename Shape, typename Lane>
__device__ __forceinline__ void
advance(const SelectiveScanFwdParams &p, Lane (&lanes)[Shape::CHANS],
        const float (&decays)[Shape::CHANS][Shape::STATES], const float2 (&pairs)[Shape::CHANS],
        const float *row_B, const float *row_C, int own, float (&sums)[Shape::CHANS]) {
    constexpr int WIDTH = Shape::WIDTH;
#pragma unroll
    for (int i = 0; i < Shape::STATES; i += WIDTH) {
        float b[WIDTH], c[WIDTH];
        read_floats(b, row_B + (i * Shape::LANES + own * WIDTH));
        if (!SUMMARY) {
            read_floats(c, row_C + (i * Shape::LANES + own * WIDTH));
        }
#pragma unroll
        for (int k = 0; k < Shape::CHANS; k++) {
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                float &h = lanes[k].h[i + j];
                float b_value = b[j], c_value = SUMMARY ? 0.0f : c[j];
                if constexpr (CONSTANT) {
                    b_value = p.B_constant ? lanes[k].B[i + j] : b_value;
                    c_value = p.C_constant ? lanes[k].C[i + j] : c_value;
                }
                h = fmaf(decays[k][i + j], h, pairs[k].y * b_value);
                if (!SUMMARY) {
                    sums[k] = i + j == 0 ? h * c_value : fmaf(h, c_value, sums[k]);
                }
            }
        }
    }
}

// VECTOR: x, dt, z and out are dense in time and aligned, nothing is packed, forwards. Else any
// strides, marks, either direction.
template <typename T, int LANES, int STATES, int CHANS, int STEPS, int TILE, int DECAYS_AHEAD,
          int WARPS, bool VECTOR, bool CONSTANT = false, bool SUMMARY = false>
__device__ __forceinline__ void selective_scan_fwd(const SelectiveScanFwdParams &p) {
    using Shape = ForwardShape<LANES, STATES, CHANS, STEPS, TILE, DECAYS_AHEAD, WARPS>;
    constexpr int OWN = Shape::OWN, TEAMS = Shape::TEAMS, PITCH = Shape::PITCH;
    extern __shared__ float4 shared_memory[];
    float *const tiles = reinterpret_cast<float *>(shared_memory);

    const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
    const int own = lane % LANES, team = lane / LANES;
    const u32 blocks_per_unit = static_cast<u32>(p.blocks_per_unit);
    const u32 blocks_per_row = static_cast<u32>(p.blocks_per_row);
    // Nobody asks for the summary of the last stretch.
    const u32 stretches = static_cast<u32>(p.num_stretches) - (SUMMARY ? 1u : 0u);
    const u32 in_row = blockIdx.x % blocks_per_row;
    const u32 stretch = blockIdx.x / blocks_per_row % stretches;
    const i64 row = blockIdx.x / blocks_per_row / stretches;
    const i64 unit_start = in_row / blocks_per_unit * p.unit_channels;
    const i64 block_channel =
        unit_start + static_cast<i64>(in_row % blocks_per_unit) * (Shape::WARPS * Shape::CHANNELS);
    const int first_step = static_cast<int>(stretch * p.stretch_steps);
    const int end_step =
        static_cast<int>(min(p.seqlen, static_cast<i64>(first_step) + p.stretch_steps));
    const int *marks =
        VECTOR || p.marks == nullptr ? nullptr : static_cast<const int *>(p.marks) + row * p.seqlen;
    const float *initial_states = static_cast<const float *>(p.initial_states);
    const float linear_from = p.dt_softplus != 0 ? 20.0f : __int_as_float(0xff800000);

    typename TokensOf<VECTOR, SelectiveScanFwdParams, T, Shape>::type tokens[CHANS];
    ChannelStates<Shape, CONSTANT> channels[CHANS];
#pragma unroll
    for (int k = 0; k < CHANS; k++) {
        const i64 first = block_channel + warp * Shape::CHANNELS + k * TEAMS;
        const i64 end = unit_start + p.unit_channels;
        tokens[k].begin(p, row, first, end, first_step, lane);
        channels[k].begin(p, first + team, end, own);
        const bool given = marks == nullptr && initial_states != nullptr && stretch == 0u;
        const i64 at = (row * p.dim + channels[k].number) * p.state_row;
        channels[k].enter(p, given ? initial_states + at : nullptr, row, SUMMARY ? 0u : stretch,
                          own);
    }
    float open = 1.0f;
    const float shift = __int_as_float(static_cast<int>(p.decay_shift));

    float *const warp_pairs = tiles + 4 * Shape::TILE_FLOATS + warp * 2 * Shape::PAIR_FLOATS;
    u32 mark_now = 0u, mark_next = 0u, mark_done = 0u; // lane's: of step `lane` of the block
    auto get_marks = [&](int step) {
        const bool exists = marks != nullptr && lane < STEPS && step + lane < end_step;
        return exists ? static_cast<u32>(marks[(step + lane) * p.marks_stride]) : 0u;
    };
    // Bit t: step t is padding.
    auto padding_of = [&](u32 mark) {
        u32 bits = 0u;
        if (!VECTOR && marks != nullptr) {
            bits = __ballot_sync(0xffffffffu, (mark & MARK_PADDING) != 0u);
        }
        return bits;
    };
    auto make_pairs = [&](int step, int buffer, u32 mark) {
        const u32 padding = padding_of(mark);
        float2 *pairs = reinterpret_cast<float2 *>(warp_pairs + buffer * Shape::PAIR_FLOATS);
#pragma unroll
        for (int k = 0; k < CHANS; k++) {
            const float total = tokens[k].make_pairs(p, pairs + k * TEAMS * PITCH, linear_from,
                                                     end_step - step, padding, lane);
            if (SUMMARY && VECTOR) {
                channels[k].span_dt += total;
            }
        }
    };
    auto finish = [&](int left, int buffer) {
        const u32 padding = padding_of(mark_done);
        const float *sums = warp_pairs + buffer * Shape::PAIR_FLOATS;
#pragma unroll
        for (int k = 0; k < CHANS && !SUMMARY; k++) {
            tokens[k].finish(p, left, padding, sums + k * TEAMS * 2 * PITCH);
        }
    };
    auto read_pairs = [&](const float *pairs, int t, float2(&now)[CHANS]) {
#pragma unroll
        for (int k = 0; k < CHANS; k++) {
            now[k] = *reinterpret_cast<const float2 *>(pairs + 2 * (k * TEAMS * PITCH + t));
            if (SUMMARY && !VECTOR) {
                channels[k].span_dt += now[k].x;
            }
        }
    };
    auto step_with = [&](const float *pairs, const float *row_B, int t, float (&sums)[CHANS]) {
        float2 now[CHANS];
        float decays[CHANS][STATES];
        read_pairs(pairs, t, now);
        make_decays<Shape>(decays, channels, now, shift);
        const float *const at = row_B + t * Shape::ROW;
        advance<SUMMARY, CONSTANT, Shape>(p, channels, decays, now, at, at + Shape::TILE_FLOATS,
                                          own, sums);
    };
    auto walk = [&](float (&y)[CHANS][STEPS], const float *pairs, const float *row_B) {
        if constexpr (Shape::ROLLED) {
#pragma unroll 2
            for (int t = 0; t < STEPS; t++) {
                float sums[CHANS];
                step_with(pairs, row_B, t, sums);
#pragma unroll
                for (int k = 0; k < CHANS && !SUMMARY; k++) {
                    keep_sum<LANES, OWN>(y[k], sums[k], t, own);
                }
            }
        } else {
            // Decays are made AHEAD steps before they are needed: ex2 takes long when all want it.
            constexpr int AHEAD_STEPS = Shape::DECAYS_AHEAD;
            float2 pair[AHEAD_STEPS + 1][CHANS];
            float decays[AHEAD_STEPS + 1][CHANS][STATES];
#pragma unroll
            for (int t = 0; t < AHEAD_STEPS; t++) {
                read_pairs(pairs, t, pair[t]);
                make_decays<Shape>(decays[t], channels, pair[t], shift);
            }
#pragma unroll
            for (int t = 0; t < STEPS; t++) {
                const int then = (t + AHEAD_STEPS) % (AHEAD_STEPS + 1), now = t % (AHEAD_STEPS + 1);
                if (t + AHEAD_STEPS < STEPS) {
                    read_pairs(pairs, t + AHEAD_STEPS, pair[then]);
                    make_decays<Shape>(decays[then], channels, pair[then], shift);
                }
                float sums[CHANS];
                const float *const at = row_B + t * Shape::ROW;
                advance<SUMMARY, CONSTANT, Shape>(p, channels, decays[now], pair[now], at,
                                                  at + Shape::TILE_FLOATS, own, sums);
#pragma unroll
                for (int k = 0; k < CHANS && !SUMMARY; k++) {
                    y[k][t] = sums[k];
                    share_out<LANES>(y[k], t, own);
                }
            }
        }
    };
    auto walk_marked = [&](float (&y)[CHANS][STEPS], const float *pairs, const float *row_B) {
#pragma unroll 1
        for (int t = 0; t < STEPS; t++) {
            const u32 now = __shfl_sync(0xffffffffu, mark_now, t);
            const i64 entry = mark_state(now, row);
            if (now & MARK_START) {
                const bool given = (now & MARK_INITIAL) != 0u && initial_states != nullptr;
#pragma unroll
                for (int k = 0; k < CHANS; k++) {
                    const i64 at = (entry * p.dim + channels[k].number) * p.state_row;
                    load_states<Shape>(channels[k].h, given ? initial_states + at : nullptr, own,
                                       p.dstate);
                }
                open = 0.0f;
            }
            float sums[CHANS];
#pragma unroll
            for (int k = 0; k < CHANS; k++) {
                sums[k] = 0.0f;
            }
            if ((now & MARK_PADDING) == 0u) {
                step_with(pairs, row_B, t, sums);
            }
#pragma unroll
            for (int k = 0; k < CHANS && !SUMMARY; k++) {
                if (now & MARK_FINAL) {
                    channels[k].store(p, p.final_states, entry, own);
                }
                keep_sum<LANES, OWN>(y[k], sums[k], t, own);
            }
        }
    };

    WeightTiles<SelectiveScanFwdParams, T, Shape, CONSTANT, SUMMARY> weights;
    weights.begin(p, row, block_channel);
    // All of a tile, where it does not fit into registers.
    auto move_weights = [&](int step, float *target) {
#pragma unroll 1
        for (int part = 0; part < decltype(weights)::PARTS; part++) {
            weights.fetch(p, step, marks, part);
            weights.put(p, target, part);
        }
    };
    constexpr bool AHEAD = decltype(weights)::PARTS == 1;
#pragma unroll
    for (int k = 0; k < CHANS; k++) {
        tokens[k].fetch_first(p, end_step - first_step);
    }
    mark_now = get_marks(first_step);
    move_weights(first_step, tiles);
    make_pairs(first_step, 0, mark_now);
    auto fetch = [&](int step) {
#pragma unroll
        for (int k = 0; k < CHANS; k++) {
            tokens[k].fetch(p, end_step - step, !SUMMARY && p.z != nullptr);
        }
    };
#pragma unroll
    for (int k = 0; k < CHANS; k++) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            tokens[k].x_now[i] = tokens[k].x_next[i];
        }
    }
    fetch(first_step);
    __syncthreads();

    int buffer = 0;
    for (int tile_step = first_step, side = 0; tile_step < end_step; tile_step += TILE, side ^= 1) {
        const bool more = tile_step + TILE < end_step;
        if (AHEAD && more) {
            weights.fetch(p, tile_step + TILE, marks);
        }
        if (!SUMMARY && p.chunk_states != nullptr) {
            const u32 chunk_size = static_cast<u32>(p.chunk_size);
            const u32 chunk = static_cast<u32>(tile_step) / chunk_size;
            if (chunk * chunk_size == static_cast<u32>(tile_step)) {
#pragma unroll
                for (int k = 0; k < CHANS; k++) {
                    channels[k].store(p, p.chunk_states, row * p.num_chunks + chunk, own);
                }
            }
        }
        const float *row_B = tiles + 2 * side * Shape::TILE_FLOATS;
        const int tile_end = min(tile_step + TILE, end_step);
#pragma unroll 1
        for (int step = tile_step; step < tile_end; step += STEPS, row_B += STEPS * Shape::ROW) {
            const float *const pairs = warp_pairs + buffer * Shape::PAIR_FLOATS + team * 2 * PITCH;
            float y[CHANS][STEPS];
            auto block = [&](bool marked) {
                finish(step == first_step ? 0 : end_step - step + STEPS, buffer ^ 1);
                if (marked) {
                    walk_marked(y, pairs, row_B);
                } else {
                    walk(y, pairs, row_B);
                }
                if (!VECTOR) {
                    __syncwarp(); // sums may now take the place of pairs, and pairs that of sums
                }
                make_pairs(step + STEPS, buffer ^ 1, mark_next);
            };
            if (!VECTOR && marks != nullptr) {
                mark_next = get_marks(step + STEPS);
            }
            if (!VECTOR && __any_sync(0xffffffffu, mark_now != 0u)) {
                block(true);
            } else {
                block(false);
            }
            mark_done = mark_now, mark_now = mark_next;
#pragma unroll
            for (int k = 0; k < CHANS; k++) {
                tokens[k].shift(
                    y[k], warp_pairs + buffer * Shape::PAIR_FLOATS + k * TEAMS * 2 * PITCH, lane);
            }
            fetch(step + STEPS);
            buffer ^= 1;
            __syncwarp();
        }
        if (more) {
            float *const other = tiles + 2 * (side ^ 1) * Shape::TILE_FLOATS;
            if (AHEAD) {
                weights.put(p, other);
            } else {
                move_weights(tile_step + TILE, other);
            }
            __syncthreads();
        }
    }
    finish(end_step - first_step - (end_step - 1 - first_step) / STEPS * STEPS, buffer ^ 1);
#pragma unroll
    for (int k = 0; k < CHANS; k++) {
        if (SUMMARY) {
#pragma unroll
            for (int mask = LANES / 2; mask >= 1 && VECTOR; mask /= 2) {
                channels[k].span_dt += __shfl_xor_sync(0xffffffffu, channels[k].span_dt, mask);
            }
            channels[k].leave_summary(p, row, stretch, own, open);
        } else if (marks == nullptr && end_step == static_cast<int>(p.seqlen)) {
            channels[k].store(p, p.final_states, row, own);
        }
    }
}
