// SPDX-License-Identifier: Apache-2.0
// A block of the backward scan: which channels, segment and tile it has, where a thread's tokens
// and states lie, and how B and C come to shared memory.

template <typename Params, typename T, int STATES, bool LARGE, bool PACKED, int CONSTANT,
          bool SUMMARY, int PARTS, bool VECTOR>
struct BackwardBlock {
    using Shared = typename Pick<SUMMARY, SummaryShared, BackwardShared<LARGE, PARTS>>::type;
    using Part = typename Shared::Part;
    static constexpr int BLOCK = PARTS * THREADS;
    static constexpr bool CONSTANT_B = (CONSTANT & 1) != 0, CONSTANT_C = (CONSTANT & 2) != 0;
    const Params &p;
    Shared &block;
    Part &s;
    int thread, lane, warp; // of the part
    int part;               // of the block
    i64 row, first_channel; // first_channel of the part
    int channels;           // of the part
    int block_channels;
    int segment;
    u32 group_B, group_C;
    int own_channel, own_step; // what this thread does of the activations: 4 steps a stripe
    int turn;                  // 0 and 1 by turns, tile by tile
    int tile_left;             // steps of the tile from its start, 0 without a channel
    float select[4][2];
    // of 16 states at a time
    int first_state;
    float rate[STATES], carry[STATES], dA[STATES];
    float fixed_B[STATES], fixed_C[STATES], fixed_dB[STATES], fixed_dC[STATES];

    __device__ __forceinline__ BackwardBlock(const Params &params, Shared &shared)
        : p(params), block(shared), s(shared.parts[PARTS > 1 ? threadIdx.x / THREADS : 0]) {
        part = PARTS > 1 ? static_cast<int>(threadIdx.x) / THREADS : 0;
        thread = static_cast<int>(threadIdx.x) % THREADS;
        lane = thread & 31, warp = thread >> 5;
        const u32 id = blockIdx.x, blocks = static_cast<u32>(p.blocks_per_row);
        const u32 number = id % blocks, rest = id / blocks;
        // The first pass has nothing to do for the first segment.
        const u32 segments = static_cast<u32>(p.num_segments) - (SUMMARY ? 1u : 0u);
        segment = static_cast<int>(rest % segments) + (SUMMARY ? 1 : 0);
        row = rest / segments;
        const i64 unit = number / static_cast<u32>(p.blocks_per_unit);
        const i64 offset = (number % static_cast<u32>(p.blocks_per_unit) * PARTS + part) * CHANNELS;
        first_channel = unit * p.unit_channels + offset;
        const i64 rest_of_unit = p.unit_channels - offset;
        channels = static_cast<int>(rest_of_unit < 0          ? 0
                                    : rest_of_unit < CHANNELS ? rest_of_unit
                                                              : CHANNELS);
        const i64 rest_of_block = rest_of_unit + part * CHANNELS;
        block_channels =
            static_cast<int>(rest_of_block < PARTS * CHANNELS ? rest_of_block : PARTS * CHANNELS);
        own_channel = p.channel_last ? lane : warp * 8 + (lane >> 2);
        own_step = p.channel_last ? warp * 4 : (lane & 3) * 4;
        const u32 channel = static_cast<u32>(unit * p.unit_channels);
        group_B = channel / static_cast<u32>(p.B_group_size);
        group_C = channel / static_cast<u32>(p.C_group_size);
        tile_left = 0, turn = 0;
    }

    // Waits for the four warps of the part.
    __device__ __forceinline__ void meet() const {
        if constexpr (PARTS == 1) {
            __syncthreads();
        } else {
            meet_at(part + 1, THREADS);
        }
    }
    __device__ __forceinline__ float &own_sum(float (*rows)[PITCH]) const {
        return rows[own_channel][TILE + own_step / 4];
    }
    // Puts D and dt_bias into shared memory, to be read after a barrier.
    __device__ __forceinline__ void keep_parameters() {
        constexpr int WIDTH = sizeof(s.dy[0]) / sizeof(float);
        if (thread < CHANNELS) {
            const i64 channel = first_channel + thread;
            const bool mine = thread < channels;
            s.dy[thread][WIDTH - 4] = mine && p.D != nullptr ? p.D[channel] : 0.0f;
            s.dy[thread][WIDTH - 3] = mine && p.dt_bias != nullptr ? p.dt_bias[channel] : 0.0f;
        }
    }
    __device__ __forceinline__ float skip() const {
        return s.dy[own_channel][sizeof(s.dy[0]) / sizeof(float) - 4];
    }
    __device__ __forceinline__ float bias() const {
        return s.dy[own_channel][sizeof(s.dy[0]) / sizeof(float) - 3];
    }
    __device__ __forceinline__ i64 token(i64 step) const {
        return p.reverse ? p.seqlen - 1 - step : step;
    }
    // How many of the four own steps from a step of the tile on there are.
    __device__ __forceinline__ int left(int tile_step) const {
        const int count = tile_left - tile_step;
        return count < 0 ? 0 : count < 4 ? count : 4;
    }
    __device__ __forceinline__ bool is_padding(int tile_step) const {
        return PACKED && (block.marks[tile_step] & MARK_PADDING) != 0;
    }
    __device__ __forceinline__ bool has_state(int i) const {
        return lane < channels && first_state + warp * STATES + i < p.dstate;
    }
    // Of the lane's channel and first state in a (.., dim, dstate) tensor.
    __device__ __forceinline__ i64 state_place(i64 leading) const {
        return (leading * p.dim + first_channel + lane) * p.dstate + first_state + warp * STATES;
    }
    __device__ __forceinline__ void load_state(float (&values)[STATES], const float *source,
                                               i64 leading) const {
        const i64 place = state_place(leading);
#pragma unroll
        for (int i = 0; i < STATES; i++) {
            values[i] = source != nullptr && has_state(i) ? source[place + i] : 0.0f;
        }
    }
    __device__ __forceinline__ void store_state(float *target, i64 leading,
                                                const float (&values)[STATES]) const {
        const i64 place = state_place(leading);
#pragma unroll
        for (int i = 0; i < STATES; i++) {
            if (has_state(i)) {
                target[place + i] = values[i];
            }
        }
    }

    // Goes to a tile: where its tensors begin, and its marks. All threads meet here.
    __device__ __forceinline__ void enter_tile(i64 start) {
        const i64 count = p.seqlen - start;
        turn ^= 1;
        tile_left = own_channel < channels ? static_cast<int>(count < TILE ? count : TILE) : 0;
        if (PACKED) {
            __syncthreads();
        }
        if (threadIdx.x < TENSORS) {
            const int which = static_cast<int>(threadIdx.x);
            char *const *tensors = reinterpret_cast<char *const *>(&p.dout);
            const i64 *strides = &p.dout_batch_stride + 3 * which;
            block.places[turn][which] =
                tensors[which] +
                (row * strides[0] + (first_channel - part * CHANNELS) * strides[1] +
                 token(start) * strides[2]) *
                    static_cast<i64>(sizeof(T));
        }
        load_marks(start);
        __syncthreads();
    }
    // Where the own channel's step of the tile lies; the launcher sees that offsets fit an int.
    __device__ __forceinline__ T *place(int which, int tile_step) const {
        const i64 *strides = &p.dout_batch_stride + 3 * which;
        const int stride = static_cast<int>(strides[2]);
        const int along = VECTOR ? tile_step : p.reverse ? -tile_step * stride : tile_step * stride;
        const int offset = (part * CHANNELS + own_channel) * static_cast<int>(strides[1]) + along;
        return reinterpret_cast<T *>(block.places[turn][which]) + offset;
    }
    // Four steps of the own channel, as they lie in memory: whole registers with VECTOR.
    __device__ __forceinline__ void fetch(u32 (&raw)[4], int which, int tile_step,
                                          bool wanted = true) const {
        const i64 stride = (&p.dout_batch_stride)[3 * which + 2];
        fetch_quad<VECTOR>(raw, place(which, tile_step), p.reverse ? -stride : stride,
                           wanted ? left(tile_step) : 0);
    }
    template <bool WHOLE>
    __device__ __forceinline__ static void fetch_quad(u32 (&raw)[4], const T *first, i64 stride,
                                                      int valid) {
        if constexpr (WHOLE) {
            load_if<Packed<T, 4>::words>(raw, first, valid > 0);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                raw[i] = load_bits_if(first + i * stride, i < valid);
            }
        }
    }
    template <bool WHOLE>
    __device__ __forceinline__ static void unpack(float (&values)[4], const u32 (&raw)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (WHOLE && sizeof(T) == 2) {
                values[i] = i % 2 == 0 ? low2<T>(raw[i / 2]) : high2<T>(raw[i / 2]);
            } else {
                values[i] = from_bits<T>(raw[i]);
            }
        }
    }
    __device__ __forceinline__ void put(int which, int tile_step, const float (&values)[4]) const {
        T *first = place(which, tile_step);
        const i64 stride = (&p.dout_batch_stride)[3 * which + 2];
        const int valid = left(tile_step);
        if constexpr (VECTOR) {
            u32 words[Packed<T, 4>::words];
#pragma unroll
            for (int i = 0; i < Packed<T, 4>::words; i++) {
                if constexpr (sizeof(T) == 4) {
                    words[i] = __float_as_uint(values[i]);
                } else {
                    words[i] = pack2<T>(values[2 * i], values[2 * i + 1]);
                }
            }
            store_if<Packed<T, 4>::words>(first, words, valid > 0);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                store_bits_if(first + i * (p.reverse ? -stride : stride), from_float<T>(values[i]),
                              i < valid);
            }
        }
    }

    __device__ __forceinline__ void load_marks(i64 start) {
        if constexpr (PACKED) {
            if (threadIdx.x < TILE) {
                const i64 step = start + threadIdx.x;
                u32 mark = 0u;
                if (step < p.seqlen) {
                    if (p.marks != nullptr) {
                        mark = p.marks[row * p.seqlen + token(step)];
                    } else {
                        mark = step == 0 ? MARK_START | MARK_INITIAL : 0u;
                    }
                }
                block.marks[threadIdx.x] = mark;
            }
        }
    }

    // B and C of 16 states; zeros where there is no token or no state.
    static constexpr int EACH = TILE * GROUP / 4 / BLOCK > 1 ? TILE * GROUP / 4 / BLOCK : 1;
    __device__ __forceinline__ void fetch_weights(u32 (&raw_B)[EACH][4], u32 (&raw_C)[EACH][4],
                                                  i64 start) const {
        const i64 state = first_state + (threadIdx.x & 15);
        if constexpr (!CONSTANT_B && !SUMMARY) {
            const T *first = static_cast<const T *>(p.B) + row * p.B_batch_stride +
                             group_B * p.B_group_stride + state * p.B_dstate_stride;
            p.B_vector ? fetch_weight<true>(raw_B, first, p.B_seqlen_stride, start)
                       : fetch_weight<false>(raw_B, first, p.B_seqlen_stride, start);
        }
        if constexpr (!CONSTANT_C) {
            const T *first = static_cast<const T *>(p.C) + row * p.C_batch_stride +
                             group_C * p.C_group_stride + state * p.C_dstate_stride;
            p.C_vector ? fetch_weight<true>(raw_C, first, p.C_seqlen_stride, start)
                       : fetch_weight<false>(raw_C, first, p.C_seqlen_stride, start);
        }
    }
    __device__ __forceinline__ void put_weights(const u32 (&raw_B)[EACH][4],
                                                const u32 (&raw_C)[EACH][4]) {
        if constexpr (!CONSTANT_B && !SUMMARY) {
            p.B_vector ? put_weight<true>(raw_B, block.B) : put_weight<false>(raw_B, block.B);
        }
        if constexpr (!CONSTANT_C) {
            p.C_vector ? put_weight<true>(raw_C, block.C) : put_weight<false>(raw_C, block.C);
        }
    }
    __device__ __forceinline__ void load_weights(i64 start) {
        u32 raw_B[EACH][4], raw_C[EACH][4];
        fetch_weights(raw_B, raw_C, start);
        put_weights(raw_B, raw_C);
    }
    static __device__ __forceinline__ int weight_step(int k) {
        return k * (BLOCK / 4) + (static_cast<int>(threadIdx.x) >> 4) * 4;
    }
    template <bool WHOLE>
    __device__ __forceinline__ void fetch_weight(u32 (&raw)[EACH][4], const T *first, i64 stride,
                                                 i64 start) const {
        const bool wanted = first_state + static_cast<int>(threadIdx.x & 15) < p.dstate;
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const i64 step = start + weight_step(k);
            const i64 count = wanted && weight_step(k) < TILE ? p.seqlen - step : 0;
            fetch_quad<WHOLE>(raw[k], first + token(step) * stride, p.reverse ? -stride : stride,
                              count < 4 ? static_cast<int>(count) : 4);
        }
    }
    template <bool WHOLE>
    __device__ __forceinline__ void put_weight(const u32 (&raw)[EACH][4], float (*target)[GROUP]) {
        const int state = static_cast<int>(threadIdx.x) & 15;
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int step = weight_step(k);
            if (step >= TILE) {
                break;
            }
            float values[4];
            unpack<WHOLE>(values, raw[k]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                target[step + i][state] = is_padding(step + i) ? 0.0f : values[i];
            }
        }
    }

    // Asks for the tile before, for the second-level cache: what comes from there a tile later has
    // a third of the latency. Lines of 128 bytes: a thread takes two of one of four tensors.
    __device__ __forceinline__ void prefetch(i64 start, i64 chunk) const {
        if (start < TILE) {
            return;
        }
        const int number = static_cast<int>(threadIdx.x);
        const int which = number / (CHANNELS * PARTS), line = number % (CHANNELS * PARTS);
        const i64 *strides = &p.dout_batch_stride + 3 * which;
        const char *tile = block.places[turn][which];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int channel = !p.channel_last ? line : PARTS > 1 ? line / TILE * 64 + 32 * k : 0;
            const int step = !p.channel_last ? 32 * k : PARTS > 1 ? line % TILE : 2 * line + k;
            const int stride = static_cast<int>(p.reverse ? -strides[2] : strides[2]);
            const int offset = channel * static_cast<int>(strides[1]) + (step - TILE) * stride;
            if (channel < block_channels && (which != Z || p.z != nullptr)) {
                prefetch_line(tile + static_cast<i64>(offset) * static_cast<i64>(sizeof(T)));
            }
        }
        const i64 states = p.dim * p.dstate;
        const i64 first = (first_channel - part * CHANNELS) * p.dstate + number * 32;
        if (!LARGE && chunk > 1 && number < CHANNELS * PARTS / 2 && first < states) {
            prefetch_line(p.chunk_states + (row * p.num_chunks + chunk - 1) * states + first);
        }
        const int state = number & 15, from = BLOCK - 32;
        if (number >= from && first_state + state < p.dstate) {
            if (number < from + 16 && !CONSTANT_B) {
                prefetch_line(static_cast<const T *>(p.B) + row * p.B_batch_stride +
                              group_B * p.B_group_stride + state * p.B_dstate_stride +
                              token(start - TILE) * p.B_seqlen_stride);
            } else if (number >= from + 16 && !CONSTANT_C) {
                prefetch_line(static_cast<const T *>(p.C) + row * p.C_batch_stride +
                              group_C * p.C_group_stride + state * p.C_dstate_stride +
                              token(start - TILE) * p.C_seqlen_stride);
            }
        }
    }
    __device__ __forceinline__ static void unpack_quad(float (&values)[4], const u32 (&raw)[4]) {
        unpack<VECTOR>(values, raw);
    }
};
