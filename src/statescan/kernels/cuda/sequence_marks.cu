// SPDX-License-Identifier: Apache-2.0
// Marks every token of a packed call with what marks.cuh lists, for one direction of processing.
//
// A block takes stretches of a row's tokens, a thread a few tokens 256 apart, so that a warp has 32
// neighbours: their marks become one word of `occupied`, which says where marks are not 0.
// cu_seqlens: each token looks for its bounds by bisection; values are clamped, so wrong ones give
// wrong marks but no access outside. seq_idx: runs show in a token's neighbours. Whether a run is
// the first or last real one of its row is a question to all tokens before or after it, asked by
// the whole block and only where a candidate is, nearest tokens first: a run that ended before, or
// one that begins after, answers no. No state is touched here, and no host value is needed.

#define MARK_THREADS 256
#define MARK_STRETCH 1024

__device__ __forceinline__ i64 index_at(const SequenceMarksParams &p, i64 offset) {
    return p.source_is_64 ? static_cast<const i64 *>(p.source)[offset]
                          : static_cast<i64>(static_cast<const int *>(p.source)[offset]);
}

__device__ __forceinline__ u32 edge_marks(const SequenceMarksParams &p, bool begins, bool ends) {
    bool start = p.reverse ? ends : begins, end = p.reverse ? begins : ends;
    return (start ? MARK_START : 0u) | (end ? MARK_END : 0u);
}

// All threads of a block call this for the same stretch.
__device__ __forceinline__ void put_mark(const SequenceMarksParams &p, i64 row, i64 token,
                                         u32 mark) {
    bool inside = token < p.seqlen;
    if (inside) {
        static_cast<u32 *>(p.marks)[row * p.seqlen + token] = mark;
    }
    u32 word = __ballot_sync(0xffffffffu, inside && mark != 0u);
    if ((threadIdx.x & 31u) == 0u && token / 32 < p.words) {
        static_cast<u32 *>(p.occupied)[row * p.words + token / 32] = word;
    }
}

__device__ __forceinline__ i64 bound_at(const SequenceMarksParams &p, i64 number) {
    i64 value = index_at(p, number * p.source_seqlen_stride);
    return value < 0 ? 0 : (value > p.seqlen ? p.seqlen : value);
}

__device__ __forceinline__ u32 mark_by_bounds(const SequenceMarksParams &p, i64 token) {
    // How many of the num_seqs + 1 bounds are at most the token.
    i64 low = 0, high = p.num_seqs + 1;
    while (low < high) {
        i64 middle = (low + high) / 2;
        if (bound_at(p, middle) <= token) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    i64 sequence = low - 1;
    i64 start = low == 0 ? 0 : bound_at(p, sequence);
    i64 end = low > p.num_seqs ? p.seqlen : bound_at(p, low);
    // Whatever the bounds say, no sequence reaches out of the row.
    u32 mark =
        edge_marks(p, token == start || token == 0, token + 1 == end || token + 1 == p.seqlen);
    if (low == 0 || low > p.num_seqs) {
        return mark;
    }
    u32 met = ((mark & MARK_START) ? MARK_INITIAL : 0u) | ((mark & MARK_END) ? MARK_FINAL : 0u);
    return mark | met | (met ? static_cast<u32>(sequence) << MARK_SEQUENCE_SHIFT : 0u);
}

struct Ids {
    const SequenceMarksParams &p;
    i64 row;
    __device__ __forceinline__ i64 at(i64 token) const {
        return index_at(p, row * p.source_batch_stride + token * p.source_seqlen_stride);
    }
    __device__ __forceinline__ bool begins(i64 token) const {
        return token == 0 || at(token - 1) != at(token);
    }
    __device__ __forceinline__ bool ends(i64 token) const {
        return token + 1 == p.seqlen || at(token + 1) != at(token);
    }
};

// Whether a real run ends among the tokens before `limit`, or begins at `limit` or later.
__device__ __forceinline__ bool ended_before(const Ids &ids, i64 limit) {
    for (i64 top = limit; top > 0; top -= MARK_STRETCH) {
        bool found = false;
#pragma unroll
        for (int k = 0; k < MARK_STRETCH / MARK_THREADS; k++) {
            i64 token = top - 1 - k * MARK_THREADS - static_cast<i64>(threadIdx.x);
            found = found || (token >= 0 && ids.at(token) >= 0 && ids.ends(token));
        }
        if (__syncthreads_or(found)) {
            return true;
        }
    }
    return false;
}

__device__ __forceinline__ bool begins_after(const Ids &ids, i64 limit) {
    for (i64 base = limit; base < ids.p.seqlen; base += MARK_STRETCH) {
        bool found = false;
#pragma unroll
        for (int k = 0; k < MARK_STRETCH / MARK_THREADS; k++) {
            i64 token = base + k * MARK_THREADS + static_cast<i64>(threadIdx.x);
            found = found || (token < ids.p.seqlen && ids.at(token) >= 0 && ids.begins(token));
        }
        if (__syncthreads_or(found)) {
            return true;
        }
    }
    return false;
}

__device__ __forceinline__ void mark_by_ids(const SequenceMarksParams &p, i64 row, i64 base) {
    constexpr int COUNT = MARK_STRETCH / MARK_THREADS;
    __shared__ int shared_first_end, shared_last_begin;
    const Ids ids{p, row};
    if (threadIdx.x == 0) {
        shared_first_end = MARK_STRETCH;
        shared_last_begin = -1;
    }
    __syncthreads();
    bool real[COUNT], begins[COUNT], ends[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        int place = k * MARK_THREADS + static_cast<int>(threadIdx.x);
        i64 token = base + place;
        real[k] = token < p.seqlen && ids.at(token) >= 0;
        begins[k] = real[k] && ids.begins(token);
        ends[k] = real[k] && ids.ends(token);
        if (ends[k]) {
            atomicMin(&shared_first_end, place);
        }
        if (begins[k]) {
            atomicMax(&shared_last_begin, place);
        }
    }
    __syncthreads();
    const int first_end = shared_first_end, last_begin = shared_last_begin;
    bool asks_first = false, asks_last = false;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        int place = k * MARK_THREADS + static_cast<int>(threadIdx.x);
        bool start = p.reverse ? ends[k] : begins[k], end = p.reverse ? begins[k] : ends[k];
        asks_first = asks_first || (start && place <= first_end);
        asks_last = asks_last || (end && place >= last_begin);
    }
    bool first = __syncthreads_or(asks_first), last = __syncthreads_or(asks_last);
    first = first && !ended_before(ids, base);
    last = last && !begins_after(ids, base + MARK_STRETCH);
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        int place = k * MARK_THREADS + static_cast<int>(threadIdx.x);
        u32 mark = edge_marks(p, begins[k], ends[k]);
        mark |= (mark & MARK_START) && first && place <= first_end ? MARK_INITIAL : 0u;
        mark |= (mark & MARK_END) && last && place >= last_begin ? MARK_FINAL : 0u;
        put_mark(p, row, base + place, real[k] ? mark : MARK_PADDING);
    }
    __syncthreads();
}

template <bool BOUNDS>
__device__ __forceinline__ void sequence_marks(const SequenceMarksParams &p) {
    const i64 stretches = (p.seqlen + MARK_STRETCH - 1) / MARK_STRETCH;
    for (i64 unit = blockIdx.x; unit < p.batch * stretches; unit += gridDim.x) {
        const i64 row = unit / stretches, base = unit % stretches * MARK_STRETCH;
        if constexpr (BOUNDS) {
            for (int k = 0; k < MARK_STRETCH; k += MARK_THREADS) {
                i64 token = base + k + static_cast<i64>(threadIdx.x);
                put_mark(p, row, token, token < p.seqlen ? mark_by_bounds(p, token) : 0u);
            }
        } else {
            mark_by_ids(p, row, base);
        }
    }
}
