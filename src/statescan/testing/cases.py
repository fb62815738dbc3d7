# SPDX-License-Identifier: Apache-2.0
"""One row for each combination of options and sizes on which every backend must match the truth.

Tensors are made from a row in `inputs.py`; how results are judged is in `compare.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Runs = tuple[tuple[int, int], ...]
"""One row of seq_idx as (id, number of tokens) pairs; a negative id is padding."""

OPS = (
    "selective_scan",
    "selective_state_update",
    "causal_conv1d",
    "causal_conv1d_update",
    "mamba_inner",
)


@dataclass(frozen=True, eq=False)
class Case:
    """What to call an op with.

    Attributes:
        op: The op's name.
        name: Unique among the op's cases; says what is special.
        sizes: Sizes by canonical name. Without ngroups B and C have no group axis; ngroups_of_C
            makes C differ from B. Without ntokens the tensors of an update have no token axis.
        flags: Options in use. The names of optional tensors and booleans (D, z, dt_bias,
            dt_softplus, initial_states, return_final_states, reverse, ...), and
            complex; constant_B, constant_C; silu; headed, tied, ring, low_state, out;
            int64 (indices, else int32); mixed (parameters and weights in half precision beside
            float32 activations, and the other way round).
        layout: channel_first, channel_last, strided (views with odd offsets and steps into
            memory that holds NaN elsewhere), or expanded (every row is row 0, with stride 0).
            Gradients of outputs have it too.
        runs: Rows of seq_idx.
        bounds: cu_seqlens.
        read, write: Slot indices of an update.
        pad_slot_id: The extra padding slot of an update.
        accepted: num_accepted_tokens of an update.
    """

    op: str
    name: str
    sizes: Mapping[str, int]
    flags: frozenset[str] = field(default_factory=frozenset)
    layout: str = "channel_first"
    runs: tuple[Runs, ...] | None = None
    bounds: tuple[int, ...] | None = None
    read: tuple[int, ...] | None = None
    write: tuple[int, ...] | None = None
    pad_slot_id: int = -1
    accepted: tuple[int, ...] | None = None

    def has(self, flag: str) -> bool:
        """Whether the option is in use."""
        return flag in self.flags

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


def all_cases(op: str | None = None) -> tuple[Case, ...]:
    """The cases of one op, or of all."""
    return _CASES if op is None else tuple(case for case in _CASES if case.op == op)


def get_case(op: str, name: str) -> Case:
    """The case of that name; KeyError lists the names there are."""
    found = {case.name: case for case in all_cases(op)}
    if name not in found:
        raise KeyError(f"no case {name!r} of {op}; there are {', '.join(sorted(found))}")
    return found[name]


_EXTRAS = ("layout", "runs", "bounds", "read", "write", "pad_slot_id", "accepted")
_DEFAULT_SIZES: dict[str, dict[str, int]] = {
    "selective_scan": {"batch": 2, "dim": 4, "seqlen": 17, "dstate": 4},
    "selective_state_update": {
        "batch": 3, "dim": 6, "dstate": 4, "slots": 3, "nheads": 4, "headdim": 3,
    },
    "causal_conv1d": {"batch": 2, "dim": 6, "seqlen": 17, "width": 4},
    "causal_conv1d_update": {
        "batch": 3, "dim": 6, "width": 4, "slots": 3, "state_len": 3,
    },
    "mamba_inner": {
        "batch": 2, "dim": 6, "seqlen": 11, "dstate": 4, "width": 4, "dt_rank": 3, "d_model": 5,
    },
}  # fmt: skip


def _case(op: str, name: str, options: str = "", **values: Any) -> Case:
    extras = {key: values.pop(key) for key in _EXTRAS if key in values}
    sizes = MappingProxyType({**_DEFAULT_SIZES[op], **values})
    return Case(op, name, sizes, frozenset(options.split()), **extras)


def _scan(name: str, options: str = "", **values: Any) -> Case:
    return _case("selective_scan", name, options, **values)


def _state(name: str, options: str = "", **values: Any) -> Case:
    return _case("selective_state_update", name, options, **values)


def _conv(name: str, options: str = "", **values: Any) -> Case:
    return _case("causal_conv1d", name, options, **values)


def _taps(name: str, options: str = "", **values: Any) -> Case:
    return _case("causal_conv1d_update", name, options, **values)


def _inner(name: str, options: str = "", **values: Any) -> Case:
    return _case("mamba_inner", name, options, **values)


_USUAL = "D z dt_bias dt_softplus"
_STATES = "initial_states return_final_states"
_ALL = f"{_USUAL} {_STATES}"
# Padding on both sides, a pad inside one id, an id that comes back, a row of nothing but padding.
_RUNS_17: tuple[Runs, ...] = (
    ((-1, 2), (5, 4), (5, 0), (-2, 1), (5, 3), (7, 1), (5, 4), (-1, 2)),
    ((-1, 17),),
    ((0, 8), (1, 9)),
)
_RUNS_11: tuple[Runs, ...] = (((-1, 1), (3, 4), (1, 1), (3, 5)), ((-1, 4), (0, 6), (-1, 1)))

_SCAN_CASES = (
    _scan("bare"),
    _scan("usual", _USUAL),
    _scan("all_options", _ALL),
    _scan("D_only", "D"),
    _scan("z_only", "z"),
    _scan("dt_bias_only", "dt_bias"),
    _scan("dt_softplus_only", "dt_softplus"),
    _scan("D_and_z", "D z", seqlen=5),
    _scan("initial_states", "initial_states"),
    _scan("final_states", "return_final_states"),
    _scan("both_states", _STATES),
    _scan("one_token", _ALL, seqlen=1),
    _scan("two_tokens", _ALL, seqlen=2),
    _scan("no_tokens", _ALL, seqlen=0),
    _scan("no_rows", _ALL, batch=0),
    _scan("no_channels", _ALL, dim=0),
    _scan("chunk_edge_below", _ALL, seqlen=63, dim=2),
    _scan("chunk_edge", _ALL, seqlen=64, dim=2),
    _scan("chunk_edge_above", _ALL, seqlen=65, dim=2),
    _scan("several_chunks", _ALL, seqlen=150, dim=2),
    _scan("dstate_1", _ALL, dstate=1),
    _scan("dstate_odd", _ALL, dstate=17, dim=3),
    _scan("one_group_axis", _ALL, ngroups=1),
    _scan("two_groups", _ALL, ngroups=2),
    _scan("group_per_channel", _ALL, ngroups=4),
    _scan("unequal_groups", _ALL, ngroups=2, ngroups_of_C=4),
    _scan("only_C_has_groups", f"{_ALL} reverse", ngroups_of_C=2),
    _scan("constant_B", f"{_ALL} constant_B"),
    _scan("constant_C", f"{_ALL} constant_C", ngroups=2),
    _scan("constant_B_C", f"{_ALL} constant_B constant_C reverse"),
    _scan("reverse", f"{_ALL} reverse"),
    _scan("reverse_long", f"{_ALL} reverse", seqlen=130, dim=2, ngroups=2),
    _scan("channel_last", _ALL, layout="channel_last", dim=5),
    _scan("channel_last_groups", f"{_ALL} reverse", layout="channel_last", ngroups=2),
    _scan("strided", _ALL, layout="strided", ngroups=2),
    _scan("expanded", _ALL, layout="expanded", ngroups=2),
    _scan("mixed", f"{_ALL} mixed"),
    _scan("seq_idx", _ALL, batch=3, runs=_RUNS_17),
    _scan("seq_idx_reverse", f"{_ALL} reverse int64", batch=3, runs=_RUNS_17, ngroups=2),
    _scan("seq_idx_bare", "return_final_states", batch=3, runs=_RUNS_17, layout="channel_last"),
    _scan("seq_idx_constant", f"{_ALL} constant_B constant_C", batch=3, runs=_RUNS_17),
    _scan("seq_idx_chunks", _ALL, batch=1, dim=2, seqlen=140,
          runs=(((0, 63), (1, 1), (2, 1), (-1, 3), (2, 60), (0, 12)),)),
    _scan("cu_seqlens", _ALL, batch=1, bounds=(0, 0, 5, 6, 6, 17)),
    _scan("cu_seqlens_reverse", f"{_ALL} reverse int64", batch=1, bounds=(0, 5, 6, 17, 17),
          ngroups=2),
    _scan("cu_seqlens_strided", _ALL, batch=1, bounds=(0, 16, 17), layout="strided"),
    _scan("cu_seqlens_chunks", _ALL, batch=1, dim=2, seqlen=140, bounds=(0, 63, 64, 65, 140)),
    _scan("complex", "complex"),
    _scan("complex_all", f"{_ALL} complex", ngroups=2),
    _scan("complex_reverse_constant", f"{_ALL} complex reverse constant_B constant_C"),
    _scan("complex_seq_idx", f"{_ALL} complex", batch=3, runs=_RUNS_17),
    _scan("complex_cu_seqlens", f"{_ALL} complex reverse", batch=1, bounds=(0, 5, 5, 17)),
)  # fmt: skip

_CONV_CASES = (
    _conv("bare"),
    _conv("bias", "bias"),
    _conv("bias_silu", "bias silu"),
    _conv("silu", "silu"),
    _conv("all_options", f"bias silu {_STATES}"),
    _conv("initial_states", "initial_states"),
    _conv("final_states", "return_final_states"),
    _conv("width_1", f"bias silu {_STATES}", width=1),
    _conv("width_2", f"bias silu {_STATES}", width=2),
    _conv("width_3", f"bias silu {_STATES}", width=3),
    _conv("width_9", f"bias silu {_STATES}", width=9),
    _conv("shorter_than_width", f"bias silu {_STATES}", seqlen=2),
    _conv("one_token", f"bias silu {_STATES}", seqlen=1),
    _conv("no_tokens", f"bias silu {_STATES}", seqlen=0),
    _conv("no_rows", f"bias silu {_STATES}", batch=0),
    _conv("no_channels", f"bias silu {_STATES}", dim=0),
    _conv("one_channel", f"bias silu {_STATES}", dim=1),
    _conv("long", f"bias silu {_STATES}", seqlen=133, dim=3),
    _conv("reverse", f"bias silu {_STATES} reverse"),
    _conv("channel_last", f"bias silu {_STATES}", layout="channel_last", dim=9),
    _conv("channel_last_reverse", f"bias {_STATES} reverse", layout="channel_last"),
    _conv("strided", f"bias silu {_STATES}", layout="strided"),
    _conv("expanded", f"bias silu {_STATES}", layout="expanded"),
    _conv("mixed", f"bias silu {_STATES} mixed"),
    _conv("seq_idx", f"bias silu {_STATES}", batch=3, runs=_RUNS_17),
    _conv("seq_idx_bare", "silu", batch=3, runs=_RUNS_17, layout="channel_last"),
    _conv("seq_idx_reverse", f"bias {_STATES} reverse int64", batch=3, runs=_RUNS_17),
    _conv("seq_idx_wide", f"bias silu {_STATES}", batch=3, runs=_RUNS_17, width=9),
    _conv("seq_idx_width_1", f"bias silu {_STATES}", batch=3, runs=_RUNS_17, width=1),
    _conv("cu_seqlens", f"bias silu {_STATES}", batch=1, bounds=(0, 0, 5, 6, 6, 17)),
    _conv("cu_seqlens_bare", "", batch=1, bounds=(0, 2, 17), layout="channel_last"),
    _conv(
        "cu_seqlens_reverse",
        f"bias silu {_STATES} reverse int64",
        batch=1,
        bounds=(0, 5, 6, 17, 17),
    ),
    _conv("cu_seqlens_wide", f"bias silu {_STATES}", batch=1, bounds=(0, 1, 3, 8, 17), width=9),
)

_GUESSES = {"ntokens": 4, "accepted": (0, 2, 4)}
_SLOTS = {"slots": 7, "read": (4, -1, 0), "write": (2, 5, 0)}

_STATE_CASES = (
    _state("bare"),
    _state("usual", _USUAL),
    _state("D_only", "D"),
    _state("z_only", "z"),
    _state("dt_bias_only", "dt_bias"),
    _state("dt_softplus_only", "dt_softplus"),
    _state("groups", _USUAL, ngroups=2),
    _state("group_per_channel", _USUAL, ngroups=6),
    _state("unequal_groups", _USUAL, ngroups=2, ngroups_of_C=3),
    _state("dstate_1", _USUAL, dstate=1),
    _state("dstate_odd", _USUAL, dstate=17),
    _state("no_rows", _USUAL, batch=0, slots=0),
    _state("no_channels", _USUAL, dim=0),
    _state("read_only", _USUAL, slots=5, read=(4, 1, 2)),
    _state("write_only", _USUAL, write=(1, 2, 0)),
    _state("read_write", _USUAL, **_SLOTS),
    _state("pad_slot", f"{_USUAL} int64", slots=7, read=(6, 3, 0), pad_slot_id=3),
    _state("all_pads", _USUAL, read=(-1, -7, -1)),
    _state("out", f"{_USUAL} out"),
    _state("low_state", f"{_USUAL} low_state"),
    _state("strided", _USUAL, layout="strided", ngroups=2, **_SLOTS),
    _state("several_tokens", _USUAL, ntokens=3, ngroups=2),
    _state("only_commit", f"{_USUAL} intermediate_states", ntokens=0, accepted=(0, 2, 1)),
    _state("several_strided", f"{_USUAL} out", ntokens=3, layout="strided", **_SLOTS),
    _state("history", f"{_USUAL} intermediate_states", ntokens=3),
    _state("rollback", f"{_USUAL} intermediate_states int64", **_GUESSES),
    _state("rollback_slots", f"{_USUAL} intermediate_states", **_GUESSES, **_SLOTS),
    _state("headed", f"{_USUAL} headed"),
    _state("headed_groups", f"{_USUAL} headed", ngroups=2, **_SLOTS),
    _state("headed_bare", "headed", ngroups=4),
    _state("headed_tied", f"{_USUAL} headed tied", ngroups=2),
    _state("headed_several", f"{_USUAL} headed out", ntokens=3, ngroups=2),
    _state("headed_rollback", f"{_USUAL} headed tied intermediate_states", **_GUESSES, **_SLOTS),
    _state("complex", f"{_USUAL} complex", ngroups=2),
    _state("complex_rollback", f"{_USUAL} complex intermediate_states", **_GUESSES),
)  # fmt: skip

_TAPS_CASES = (
    _taps("bare"),
    _taps("bias", "bias"),
    _taps("bias_silu", "bias silu"),
    _taps("width_1", "bias silu", width=1),
    _taps("width_1_no_state", "bias silu", width=1, state_len=0),
    _taps("width_2", "bias silu", width=2),
    _taps("width_9", "bias silu", width=9, state_len=8),
    _taps("longer_state", "bias silu", state_len=7),
    _taps("no_rows", "bias silu", batch=0, slots=0),
    _taps("no_channels", "bias silu", dim=0),
    _taps("read_only", "bias silu", slots=5, read=(4, 1, 2)),
    _taps("write_only", "bias silu", write=(1, 2, 0)),
    _taps("read_write", "bias silu", **_SLOTS),
    _taps("pad_slot", "bias silu int64", slots=7, read=(6, 3, 0), pad_slot_id=3),
    _taps("all_pads", "bias silu", read=(-1, -7, -1)),
    _taps("out", "bias silu out"),
    _taps("mixed", "bias silu mixed"),
    _taps("strided", "bias silu", layout="strided", **_SLOTS),
    _taps("channel_last_several", "bias silu", layout="channel_last", ntokens=3),
    _taps("several_tokens", "bias silu", ntokens=3),
    _taps("more_tokens_than_state", "bias silu out", ntokens=5),
    _taps("ring", "bias silu ring", state_len=5),
    _taps("ring_exact", "bias silu ring"),
    _taps("ring_several", "bias silu ring int64", state_len=5, ntokens=7, **_SLOTS),
    _taps("ring_width_1", "silu ring", width=1, state_len=2, ntokens=2),
    _taps("history", "bias silu intermediate_states", ntokens=3, state_len=4),
    _taps("rollback", "bias silu intermediate_states", state_len=4, **_GUESSES),
    _taps("rollback_slots", "bias silu intermediate_states", **_GUESSES, **_SLOTS),
    _taps("ring_rollback", "silu ring intermediate_states", state_len=9, **_GUESSES, **_SLOTS),
    _taps("only_commit", "bias intermediate_states", ntokens=0, accepted=(0, 2, 1)),
)

_INNER_OPTIONS = "conv_bias silu D dt_bias dt_softplus"

_INNER_CASES = (
    _inner("bare", "dt_softplus"),
    _inner("usual", f"{_INNER_OPTIONS} out_proj"),
    _inner("no_softplus", f"conv_bias silu D dt_bias {_STATES}"),
    _inner("no_out_proj", f"{_INNER_OPTIONS} {_STATES}"),
    _inner("biases", f"{_INNER_OPTIONS} out_proj out_proj_bias b_proj_bias c_proj_bias"),
    _inner("norms", f"{_INNER_OPTIONS} {_STATES} b_norm c_norm dt_norm b_proj_bias"),
    _inner("norms_out_proj", f"{_INNER_OPTIONS} out_proj b_norm c_norm dt_norm c_proj_bias"),
    _inner("constant_B", f"{_INNER_OPTIONS} {_STATES} constant_B c_norm out_proj"),
    _inner("constant_B_C", f"{_INNER_OPTIONS} {_STATES} constant_B constant_C out_proj"),
    _inner("reverse", f"{_INNER_OPTIONS} {_STATES} out_proj reverse"),
    _inner("one_token", f"{_INNER_OPTIONS} {_STATES} out_proj", seqlen=1),
    _inner("no_tokens", f"{_INNER_OPTIONS} {_STATES} out_proj", seqlen=0),
    _inner("chunks", f"{_INNER_OPTIONS} {_STATES} out_proj", seqlen=70, dim=3, width=2),
    _inner("channel_last", f"{_INNER_OPTIONS} out_proj", layout="channel_last", width=3),
    _inner("strided", f"{_INNER_OPTIONS} {_STATES}", layout="strided"),
    _inner("mixed", f"{_INNER_OPTIONS} {_STATES} out_proj mixed"),
    _inner("seq_idx", f"{_INNER_OPTIONS} {_STATES} out_proj out_proj_bias b_norm", runs=_RUNS_11),
    _inner("cu_seqlens", f"{_INNER_OPTIONS} {_STATES} out_proj", batch=1, bounds=(0, 3, 3, 11)),
    _inner("complex", f"{_INNER_OPTIONS} {_STATES} out_proj complex"),
    _inner("complex_norms", f"{_INNER_OPTIONS} complex b_norm c_norm dt_norm b_proj_bias"),
)

_CASES = (*_SCAN_CASES, *_STATE_CASES, *_CONV_CASES, *_TAPS_CASES, *_INNER_CASES)
