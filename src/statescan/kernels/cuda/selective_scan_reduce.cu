// SPDX-License-Identifier: Apache-2.0
// Adds up what the blocks of the backward scan left, in a fixed order, into the gradients.
//
// A job fills one gradient, seen as lines (batch, group, state) of `length` neighbours; each number
// is the sum of `rows` numbers `row_stride` apart. Grid: x counts blocks of 128 neighbours of a
// line, job after job. A block's eight warps take every eighth row; then their sums are added in
// the order of the warps. Float32 until the store.

constexpr int SLICES = 8;
constexpr int EACH = 4; // neighbours of a lane, 32 apart

struct ReduceJob {
    const float *source;
    void *target;
    i64 dtype, rows, row_stride, length, states, groups;
    i64 batch_stride, group_stride, state_stride;
    i64 reverse; // the source's neighbours are in the order of processing
    i64 blocks;
};

__device__ __forceinline__ void selective_scan_reduce(const SelectiveScanReduceParams &p) {
    __shared__ float parts[SLICES][32 * EACH];
    const int lane = static_cast<int>(threadIdx.x) & 31, slice = static_cast<int>(threadIdx.x) >> 5;
    const ReduceJob *job = reinterpret_cast<const ReduceJob *>(&p.source_0);
    i64 block = blockIdx.x;
    while (block >= job->blocks) {
        block -= job->blocks;
        job++;
    }
    const i64 blocks_per_line = (job->length + 32 * EACH - 1) / (32 * EACH);
    const i64 line = block / blocks_per_line, first = block % blocks_per_line * (32 * EACH);
    const i64 state = line % job->states, outer = line / job->states;
    const float *source = job->source + outer / job->groups * job->batch_stride +
                          outer % job->groups * job->group_stride + state * job->state_stride;
    float sums[EACH] = {};
#pragma unroll 2
    for (i64 row = slice; row < job->rows; row += SLICES) {
        const float *numbers = source + row * job->row_stride;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const i64 at = first + i * 32 + lane;
            if (at < job->length) {
                sums[i] += numbers[job->reverse ? job->length - 1 - at : at];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        parts[slice][i * 32 + lane] = sums[i];
    }
    __syncthreads();
    const int own = static_cast<int>(threadIdx.x);
    if (own < 32 * EACH && first + own < job->length) {
        float total = parts[0][own];
#pragma unroll
        for (int other = 1; other < SLICES; other++) {
            total += parts[other][own];
        }
        store_any(job->target, line * job->length + first + own, static_cast<int>(job->dtype),
                  total);
    }
}
