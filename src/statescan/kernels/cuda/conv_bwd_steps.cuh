// SPDX-License-Identifier: Apache-2.0
// STEPS of the convolution's gradients: what ROWS and WALK leave out, since a sequence begins or
// ends near it or a vector does not fit. One step follows the other, and numbers are read one by
// one from wherever they lie, so this is slow: for few tiles only. A kernel of its own, so that the
// others have registers for what they do everywhere; not launched where nothing is left out.

// What the walk over these steps knows of those before the next one.
template <int TAPS> struct StepWalker {
    static constexpr int HALO = TAPS - 1;
    const Gradients channel;
    const int width;
    Taps<TAPS, 1> taps;
    Sums<TAPS> sums;
    float history[HALO][1]; // inputs, newest first
    float pending[HALO];    // their gradients so far
    int since;              // steps since the sequence of the last step began, if few

    __device__ __forceinline__ StepWalker(const Params &p, i64 row, i64 number)
        : channel(p, row, number), width(static_cast<int>(p.width)) {
    }
    __device__ __forceinline__ void enter(i64 first) {
        taps.load(channel.p, channel.channel);
        sums.clear();
        since = load_history<Params>(channel, first, history) - 1;
#pragma unroll
        for (int d = 0; d < HALO; d++) {
            pending[d] = 0.0f;
        }
    }
    __device__ __forceinline__ void begin(u32 mark) {
        since = 0;
#pragma unroll
        for (int d = 0; d < HALO; d++) {
            history[d][0] = channel.initial(mark, width - 2 - d);
        }
    }
    // Returns the gradient of the input HALO steps before, which nothing can change any more.
    // Only the sums of `own` steps are wanted.
    __device__ __forceinline__ float advance(i64 step, u32 mark, bool own) {
        const Params &p = channel.p;
        const bool real = step < p.seqlen && !(mark & MARK_PADDING);
        const float x = step < p.seqlen ? channel.x(step) : 0.0f;
        float dpre =
            real ? load_any(p.dout, channel.dout_at(step), static_cast<int>(p.dout_dtype)) : 0.0f;
        since++;
        if (mark & MARK_START) {
            begin(mark);
        }
        float pre = taps.bias[0] + taps.tap[0][0] * x;
#pragma unroll
        for (int d = 1; d < TAPS; d++) {
            if (has_tap<TAPS>(d, width)) {
                pre += taps.tap[d][0] * history[d - 1][0];
            }
        }
        float newest = 0.0f;
        if (real) {
            dpre = p.silu ? dpre * silu_slope(pre) : dpre;
            newest = taps.tap[0][0] * dpre;
            if (own) {
                sums.dbias += dpre;
                sums.dtap[0] += dpre * x;
            }
#pragma unroll
            for (int d = 1; d < TAPS; d++) {
                if (has_tap<TAPS>(d, width)) {
                    sums.dtap[d] += own ? dpre * history[d - 1][0] : 0.0f;
                    pending[d - 1] += d <= since ? taps.tap[d][0] * dpre : 0.0f;
                }
            }
            if (p.dfinal_states && (mark & MARK_FINAL)) {
                newest += width > 1 ? channel.dfinal(mark, width - 2) : 0.0f;
#pragma unroll
                for (int d = 1; d < HALO; d++) {
                    if (d < width - 1 && d <= since) {
                        pending[d - 1] += channel.dfinal(mark, width - 2 - d);
                    }
                }
            }
        }
        const float oldest = pending[HALO - 1];
#pragma unroll
        for (int d = HALO - 1; d > 0; d--) {
            pending[d] = pending[d - 1];
            history[d][0] = history[d - 1][0];
        }
        pending[0] = newest;
        history[0][0] = x;
        return oldest;
    }
};

// Writes dx of the steps of one channel, and the gradients of the initial states that enter there;
// returns what they add to the sums. Steps outside of the row are none.
template <int TAPS>
__device__ __forceinline__ Sums<TAPS> special_steps(const Params &p, i64 row, i64 number, i64 first,
                                                    int count) {
    constexpr int HALO = TAPS - 1;
    if (first < 0) {
        count += static_cast<int>(first);
        first = 0;
    }
    count = static_cast<int>(smaller(count, p.seqlen - first));
    StepWalker<TAPS> walker(p, row, number);
    walker.enter(first);
    const Gradients &channel = walker.channel;
#pragma unroll 1
    for (int i = 0; i < count + HALO; i++) {
        const i64 step = first + i;
        const u32 mark = step < p.seqlen ? channel.mark(step) : MARK_PADDING;
        const float dx = walker.advance(step, mark, i < count);
        if (i >= HALO) {
            store_any(p.dx, channel.dx_at(step - HALO), static_cast<int>(p.x_dtype), dx);
        }
    }
#pragma unroll 1
    for (int i = 0; p.dinitial_states && i < count; i++) {
        if (channel.mark(first + i) & MARK_INITIAL) {
            store_dinitial(p, row, number, first + i);
        }
    }
    return walker.sums;
}

// A block has 32 channels of a part, each of its warps every 8th tile of them. The sums of its
// warps are added up in their order, and then to what the other kernel has left of the part.
template <int TAPS> __device__ __forceinline__ void gradients_steps(const Params &p) {
    constexpr int WARPS = 8;
    __shared__ float shared[WARPS][TAPS + 1][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 channel = static_cast<i64>(blockIdx.x) * 32 + lane, part = blockIdx.y;
    const i64 stretches = (p.seqlen + p.lead + p.part_size - 1) / p.part_size;
    const i64 row_part = part / stretches, number = part - row_part * stretches;
    const i64 last_row = smaller((row_part + 1) * p.part_rows, p.batch);
    const bool reverse = p.reverse != 0;
    Sums<TAPS> sums;
    sums.clear();
    for (i64 row = row_part * p.part_rows; channel < p.dim && row < last_row; row++) {
        i64 start = number * p.part_size, limit = smaller(start + p.part_size, p.seqlen);
        bool together = false;
        int inner = 0;
        if (p.rows) {
            const RowPlace place(p, row, channel, static_cast<int>(number), p.x_dtype == 0 ? 4 : 2);
            start = place.start, limit = place.limit;
            together = place.together;
            inner = place.inner();
        }
#pragma unroll 1
        for (i64 at = start + warp * CONV_BATCH; at < limit; at += WARPS * CONV_BATCH) {
            i64 first = at;
            bool wanted;
            if (p.rows) {
                const int token = static_cast<int>(at);
                wanted =
                    (tile_kind<TAPS>(p, row, together, inner, token, reverse) & TILE_SPECIAL) != 0u;
                first = reverse ? p.seqlen - at - CONV_BATCH : at;
            } else {
                wanted = special_batch<TAPS>(p, row, at);
            }
            if (wanted) {
                sums.add(special_steps<TAPS>(p, row, channel, first, CONV_BATCH), 1.0f);
            }
        }
    }
#pragma unroll
    for (int d = 0; d <= TAPS; d++) {
        shared[warp][d][lane] = d < TAPS ? sums.dtap[d < TAPS ? d : 0] : sums.dbias;
    }
    __syncthreads();
    for (int d = warp; d <= TAPS; d += WARPS) {
        if (channel < p.dim && (d < p.width || d == TAPS)) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) {
                sum += shared[i][d][lane];
            }
            *partial_at(p, part, d == TAPS ? p.width : d, channel) += sum;
        }
    }
}
