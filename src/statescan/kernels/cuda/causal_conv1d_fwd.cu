// SPDX-License-Identifier: Apache-2.0
// out[t] = act(bias + sum over d of tap[d] x[t - d]) for every channel, and the final states.
//
// ROWS (tokens are neighbours in memory): a warp walks a part: a stretch of the tokens of some rows
// of a channel, 512 of them at once. WALK (channels are neighbours): a thread owns COUNT
// neighbouring channels and walks a stretch of tokens; with any_t it takes any strides. Both take a
// row for one sequence that begins with zeros. STEPS follows where that may be wrong: it makes the
// few tokens anew that a beginning lies near, and writes final states of packed sequences, so that
// what happens once a sequence costs nothing elsewhere, neither registers nor branches. ANY: a
// thread makes one token after the other, reading everything anew; any width and strides.
// Arithmetic is float32; no shared memory.

enum Road { ROWS, WALK, STEPS, ANY };

__device__ __forceinline__ void convolve_any(const Params &p) {
    const bool tokens_first = p.x_seqlen_stride <= p.x_dim_stride;
    const i64 inner = tokens_first ? p.seqlen : p.dim, outer = tokens_first ? p.dim : p.seqlen;
    for (i64 unit = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
         unit < p.batch * p.dim * p.seqlen; unit += static_cast<i64>(gridDim.x) * blockDim.x) {
        i64 rest, fast, row, slow;
        divide(unit, inner, rest, fast);
        divide(rest, outer, row, slow);
        const i64 step = tokens_first ? fast : slow;
        const Channel<Params> channel{p, row, tokens_first ? slow : fast};
        const u32 mark = channel.mark(step);
        float result = 0.0f;
        if (!(mark & MARK_PADDING)) {
            result = channel.convolved(step);
            result = p.silu ? result * sigmoid(result) : result;
        }
        const i64 offset = row * p.out_batch_stride + channel.channel * p.out_dim_stride +
                           channel.token(step) * p.out_seqlen_stride;
        store_any(p.out, offset, static_cast<int>(p.x_dtype), result);
        if (mark & MARK_FINAL) {
            store_final(p, row, channel.channel, step);
        }
    }
}

template <Road ROAD, typename T, int TAPS, int COUNT>
__device__ __forceinline__ void causal_conv1d_fwd(const Params &p) {
    if constexpr (ROAD == ROWS) {
        convolve_rows<T, TAPS>(p);
    } else if constexpr (ROAD == WALK) {
        convolve_walk<T, TAPS, COUNT>(p);
    } else if constexpr (ROAD == STEPS) {
        convolve_steps(p);
    } else {
        convolve_any(p);
    }
}
