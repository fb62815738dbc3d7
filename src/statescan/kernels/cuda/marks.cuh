// SPDX-License-Identifier: Apache-2.0
// What the mark of a token says: where packed sequences begin and end, and which states they meet.
//
// Marks are int32 (batch, seqlen), made by sequence_marks.cu for one direction of processing. 0 is
// a token that goes on with its sequence, so a tile without marks needs nothing of what is here.
// The order at a token: START first, then the token, then END. Unpacked calls have no marks.

enum : u32 {
    MARK_START = 1u,   // first of its sequence in the order of processing
    MARK_END = 2u,     // last of it
    MARK_PADDING = 4u, // no token at all; no other bit is set
    MARK_INITIAL = 8u, // with START: an initial state enters, otherwise zeros
    MARK_FINAL = 16u,  // with END: the state after it is asked for
};
#define MARK_SEQUENCE_SHIFT 5

// Which of the initial or final states a token with MARK_INITIAL or MARK_FINAL means: the number of
// its sequence with cu_seqlens, whose only row is 0, and its row with seq_idx.
__device__ __forceinline__ i64 mark_state(u32 mark, i64 row) {
    return row + static_cast<i64>(mark >> MARK_SEQUENCE_SHIFT);
}

// The marks of one call; null where it is not packed. `occupied` has a word for 32 tokens of a row:
// bit t % 32 of word t / 32 says whether the mark of token t is anything but 0.
struct Marks {
    const u32 *marks;
    const u32 *occupied;
    i64 seqlen;
    i64 words;

    __device__ __forceinline__ u32 at(i64 row, i64 token) const {
        return marks[row * seqlen + token];
    }
    // Bit i says whether token `first` + i is marked, for 32 tokens. Those outside the row are not.
    __device__ __forceinline__ u32 window(i64 row, i64 first) const {
        const i64 word = first >> 5;
        const u32 *words_of_row = occupied + row * words;
        const u32 low = word >= 0 && word < words ? words_of_row[word] : 0u;
        const u32 high = word + 1 >= 0 && word + 1 < words ? words_of_row[word + 1] : 0u;
        const u32 shift = static_cast<u32>(first & 31);
        return shift == 0 ? low : (low >> shift) | (high << (32u - shift));
    }
};
