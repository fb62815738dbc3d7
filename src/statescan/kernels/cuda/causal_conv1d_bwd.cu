// SPDX-License-Identifier: Apache-2.0
// Gradients of the causal convolution. With pre[t] = bias + sum over d of tap[d] x[t - d] and
// dpre = dout act'(pre), inside a sequence
//
//     dx[t]   = sum over d of tap[d] dpre[t + d]       (d up to the sequence's end)
//     dtap[d] = sum over t of dpre[t] x[t - d]         (x before the beginning: initial state)
//     dbias   = sum over t of dpre[t]
//
// and what tap[d] dpre[t + d] would give to a token before the beginning goes to the initial
// state. The final state is a copy of the last width - 1 inputs, so its gradient is added to
// theirs.
//
// ROWS (tokens are neighbours in memory): a warp owns a channel and a part: a stretch of the tokens
// of some rows. A lane makes dpre of 8 neighbouring tokens and of the width - 1 after them, from
// vectors that its neighbours load too. Tiles near the ends of sequences are for `special_tile`,
// which keeps its window in shared memory. WALK (channels are neighbours): a thread owns CHANNELS
// of them and walks a stretch of the tokens of some rows and width - 1 further ones, dx trailing by
// TAPS - 1 steps. ANY: a warp owns a channel and a part of the tokens, and reads everything anew.
// x and dout come from memory once, dx goes there once.
//
// dtap and dbias are summed in float32 over a thread's tokens, in ROWS then over a warp; each part
// leaves its sums in `partials` (parts, width + 1, dim), and SUMS adds these up in a fixed order.
// The parts depend on the shape alone, so the bits are the same every time.

enum Road { ROWS, WALK, ANY, SUMS };

__device__ __forceinline__ float input_gradient(const Gradients &channel, i64 step) {
    const Params &p = channel.p;
    float sum = 0.0f;
    for (i64 d = 0; d < p.width; d++) {
        sum += channel.tap(d) * channel.dpre(step + d);
        if (channel.mark(step + d) & MARK_END) {
            break;
        }
    }
    return p.dfinal_states ? sum + dfinal_of(p, channel.row, channel.channel, step) : sum;
}

// The lanes of a warp have 32 neighbouring steps. All of them come here, whether they have one.
__device__ __forceinline__ void add_steps(const Gradients &channel, i64 step, i64 part) {
    const Params &p = channel.p;
    const bool inside = step < p.seqlen;
    const u32 mark = inside ? channel.mark(step) : MARK_PADDING;
    const bool real = !(mark & MARK_PADDING);
    const float dpre = real ? channel.dpre(step) : 0.0f;
    i64 since = -1;
    u32 start = 0;
    for (i64 d = 0; d <= p.width; d++) {
        float product = d == p.width ? dpre : 0.0f;
        if (real && d < p.width) {
            if (since >= 0) {
                product = dpre * channel.initial(start, p.width - 1 - (d - since));
            } else {
                product = dpre * channel.x(step - d);
                const u32 found = channel.mark(step - d);
                since = found & MARK_START ? d : -1;
                start = found;
            }
        }
        const float sum = warp_sum(product);
        if (threadIdx.x % 32 == 0) {
            *partial_at(p, part, d, channel.channel) += sum;
        }
    }
    if (inside) {
        store_any(p.dx, channel.dx_at(step), static_cast<int>(p.x_dtype),
                  real ? input_gradient(channel, step) : 0.0f);
        if (p.dinitial_states && (mark & MARK_INITIAL)) {
            store_dinitial(p, channel.row, channel.channel, step);
        }
    }
}

__device__ __forceinline__ void gradients_any(const Params &p) {
    const i64 warps = static_cast<i64>(gridDim.x) * (blockDim.x / 32);
    const i64 pieces = (p.seqlen + 31) / 32;
    for (i64 unit = static_cast<i64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
         unit < p.parts * p.dim; unit += warps) {
        i64 part, channel;
        divide(unit, p.dim, part, channel);
        for (i64 d = 0; threadIdx.x % 32 == 0 && d <= p.width; d++) {
            *partial_at(p, part, d, channel) = 0.0f;
        }
        const i64 end = smaller((part + 1) * p.part_size, p.batch * pieces);
        for (i64 piece = part * p.part_size; piece < end; piece++) {
            i64 row, number;
            divide(piece, pieces, row, number);
            add_steps(Gradients(p, row, channel), number * 32 + threadIdx.x % 32, part);
        }
    }
}

// Adds up the parts: a block has 32 channels of one tap, each of its warps every 32nd part.
__device__ __forceinline__ void add_partials(const Params &p) {
    __shared__ float shared[32][33];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 groups = (p.dim + 31) / 32;
    for (i64 unit = blockIdx.x; unit < groups * (p.width + 1); unit += gridDim.x) {
        i64 tap, group;
        divide(unit, groups, tap, group);
        const i64 channel = group * 32 + lane;
        float sum = 0.0f;
        if (channel < p.dim) {
#pragma unroll 8
            for (i64 part = warp; part < p.parts; part += 32) {
                sum += *partial_at(p, part, tap, channel);
            }
        }
        shared[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && channel < p.dim) {
            float total = 0.0f;
#pragma unroll 8
            for (int i = 0; i < 32; i++) {
                total += shared[i][lane];
            }
            if (tap < p.width) {
                store_any(p.dweight, channel * p.width + p.width - 1 - tap,
                          static_cast<int>(p.weight_dtype), total);
            } else if (p.dbias) {
                store_any(p.dbias, channel, static_cast<int>(p.bias_dtype), total);
            }
        }
        __syncthreads();
    }
}

// COUNT: tiles of a lane at once (ROWS), or channels of a thread (WALK).
template <Road ROAD, typename T, int TAPS, int COUNT>
__device__ __forceinline__ void causal_conv1d_bwd(const Params &p) {
    if constexpr (ROAD == ROWS) {
        gradients_rows<T, TAPS, COUNT>(p);
    } else if constexpr (ROAD == WALK) {
        gradients_walk<T, TAPS, COUNT>(p);
    } else if constexpr (ROAD == ANY) {
        gradients_any(p);
    } else {
        add_partials(p);
    }
}
