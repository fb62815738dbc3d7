# SPDX-License-Identifier: Apache-2.0
import json
import re
from pathlib import Path

import pytest

from statescan.doctor import catalog
from statescan.doctor.symbols import generation

# What published extensions, one built for each release of torch, ask of torch.
ASKED = json.loads((Path(__file__).parent / "symbols_by_torch.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("torch", ASKED)
def test_the_range_of_a_real_extension_holds_its_torch_and_no_distant_one(torch):
    found = generation.generation(ASKED[torch])
    releases = list(ASKED)
    fitting = [release for release in releases if generation.in_range(found, release)]
    assert torch in fitting
    # Neighbours may share all names; a release further away never does.
    assert len(fitting) <= 2 or torch == "1.13"
    assert found["because"]


@pytest.mark.parametrize("torch", ASKED)
def test_the_string_abi_of_a_real_extension(torch):
    # These were built with old strings up to torch 2.6, and with new ones from 2.7 on.
    new = generation.version(torch) >= (2, 7)
    assert generation.cxx11_abi(ASKED[torch]) is new


@pytest.mark.parametrize("row", catalog.load("symbols")["generations"], ids=lambda row: row["id"])
def test_every_row_of_the_catalogue_is_seen_in_its_releases_only(row):
    pattern = re.compile(row["pattern"])
    seen = [torch for torch, names in ASKED.items() if any(map(pattern.search, names))]
    assert seen, "no real extension has such a name"
    assert row["meaning"]
    span = {"first": row.get("first"), "last": row.get("last")}
    assert all(generation.in_range(span, torch) for torch in seen)
    assert row.get("first") or row.get("last")


@pytest.mark.parametrize(
    ("symbol", "first", "last"),
    [
        ("_ZN3c104cuda9SetDeviceEi", None, "2.2"),
        ("_ZN3c104cuda9SetDeviceEa", "2.3", "2.7"),
        ("_ZN3c104cuda9SetDeviceEab", "2.8", None),
        (
            "_ZN3c107WarningC1ENS_7variantIJNS0_11UserWarningENS0_18DeprecationWarningEEEE",
            None,
            "2.1",
        ),
        (
            "_ZN3c107WarningC2ESt7variantIJNS0_11UserWarningENS0_18DeprecationWarningEEEE",
            "2.2",
            None,
        ),
        (
            "_ZN2at4_ops10zeros_like4callERKNS_6TensorEN3c108optionalINS5_10ScalarTypeEEE",
            None,
            "2.1",
        ),
        ("_ZN2at4_ops10zeros_like4callERKNS_6TensorESt8optionalIN3c1010ScalarTypeEEE", "2.2", None),
        ("_ZNK3c1017SymbolicShapeMeta18init_is_contiguousEv", "2.2", None),
        ("_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib", "2.0", "2.9"),
        ("_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb", "2.10", None),
        ("_ZN3c104impl3cow23materialize_cow_storageERNS_11StorageImplE", "2.5", "2.12"),
    ],
)
def test_single_names_decode_to_a_range(symbol, first, last):
    found = generation.generation([symbol])
    assert (found["first"], found["last"]) == (first, last)
    assert {row["symbol"] for row in found["because"]} == {symbol}


@pytest.mark.parametrize(
    ("symbol", "abi"),
    [
        ("_ZN3c106detail14torchCheckFailEPKcS2_jRKSs", False),
        ("_ZN3c105ErrorC2ENS_14SourceLocationESs", False),
        ("_ZN3c107Warning4warnERKNS_14SourceLocationERKSsb", False),
        ("_ZN3c107WarningC1ESt7variantIJEENS_14SourceLocationESsb", False),
        (
            "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcEE",
            True,
        ),
        ("_ZNK5torch8autograd4Node4nameB5cxx11Ev", True),
        # An identifier may hold the letters that stand for a string elsewhere.
        ("_ZN3c1012GlassStorageEv", None),
        ("_ZN2at9PressSssoEv", None),
        ("_ZN3c104cuda9SetDeviceEi", None),
        ("_ZN2at1xILi10EEEvS1_", None),
        ("malloc", None),
        ("_Z" + "9" * 300 + "Ss", None),
    ],
)
def test_strings_in_a_name(symbol, abi):
    assert generation.string_abi(symbol) is abi


def test_torch_decides_about_strings_before_other_libraries():
    old, new = "_ZN3c105ErrorC2ESs", "_ZNSt7__cxx1112basic_stringIcE6appendEv"
    assert generation.cxx11_abi([old], [new, new]) is False
    assert generation.cxx11_abi([], [new]) is True
    assert generation.cxx11_abi([], ["printf"]) is None


@pytest.mark.parametrize(
    ("symbol", "torch", "cuda"),
    [
        ("_ZN3c104cuda9SetDeviceEi", True, True),
        ("_ZN2at4cuda26getCurrentDevicePropertiesEv", True, True),
        ("_ZNK3c104cuda10CUDAStream6streamEv", True, True),
        ("aoti_torch_get_current_cuda_stream", True, True),
        ("aoti_torch_delete_tensor_object", True, False),
        ("_ZN2at10empty_likeERKNS_6TensorE", True, False),
        ("_ZTIN5torch8autograd4NodeE", True, False),
        ("_ZNR5torch7Library5_implEPKcONS_11CppFunctionE", True, False),
        ("_Z16THPVariable_WrapN2at10TensorBaseE", True, False),
        ("THPVariableClass", True, False),
        ("_ZNSt6vectorIN2at6TensorESaIS1_EED1Ev", False, False),
        ("cudaMalloc", False, False),
        ("PyList_New", False, False),
    ],
)
def test_whose_symbol_it_is(symbol, torch, cuda):
    assert generation.is_torch_symbol(symbol) is torch
    assert generation.is_cuda_only(symbol) is cuda


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (None, "2.2", "torch 2.2 or older"),
        ("2.10", None, "torch 2.10 or newer"),
        ("2.3", "2.7", "torch 2.3 to 2.7"),
        ("2.5", "2.5", "torch 2.5"),
        ("2.10", "2.9", "different versions of torch (2.9 or older, and 2.10 or newer)"),
    ],
)
def test_a_range_in_words(first, last, words):
    assert generation.range_text({"first": first, "last": last}) == words


def test_versions_are_numbers_and_not_text():
    found = {"first": "2.2", "last": "2.9"}
    assert not generation.in_range(found, "2.10.0+cu128")
    assert generation.in_range(found, "2.9.1")


def test_names_that_tell_nothing_give_no_range():
    assert generation.generation(["_ZN2at10empty_likeERKNS_6TensorE", "malloc"]) is None
