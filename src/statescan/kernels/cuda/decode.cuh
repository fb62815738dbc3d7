// SPDX-License-Identifier: Apache-2.0
// Slots of the decode ops: where each row starts from and where its state goes. No arithmetic.

struct RowSlots {
    i64 read;
    i64 write;
    i64 accepted; // 0: from the pool, n: from what was kept after token n - 1
    bool padding;
};

// An index is int32 or int64 (`bits`), 0 elements of a list that is not given are asked for.
__device__ __forceinline__ i64 index_of(const void *list, i64 bits, i64 stride, i64 row) {
    return bits == 64 ? static_cast<const i64 *>(list)[row * stride]
                      : static_cast<i64>(static_cast<const int *>(list)[row * stride]);
}

// Indices beyond the pool are not checked on the host: they count as its last slot.
template <typename P> __device__ __forceinline__ RowSlots slots_of(const P &p, i64 row) {
    RowSlots found = {row, row, 0, false};
    if (p.read) {
        const i64 slot = index_of(p.read, p.read_bits, p.read_stride, row);
        found.padding = slot < 0 || slot == p.pad_slot;
        found.read = found.write = slot < p.num_slots ? slot : p.num_slots - 1;
    }
    if (p.write) {
        const i64 slot = index_of(p.write, p.write_bits, p.write_stride, row);
        found.padding = found.padding || slot < 0 || slot == p.pad_slot;
        found.write = slot < p.num_slots ? slot : p.num_slots - 1;
    }
    if (p.accepted && !found.padding) {
        const i64 count = index_of(p.accepted, p.accepted_bits, p.accepted_stride, row);
        found.accepted = count < 0 ? 0 : (count < p.kept_tokens ? count : p.kept_tokens);
    }
    if (p.start_by_row) {
        found.read = row;
    }
    return found;
}
