# SPDX-License-Identifier: Apache-2.0
"""Where the code of a kernel comes from: shipped cubins, compilation and its cache, shipped PTX."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.fake_driver import ELF, KERNEL, PTX, clear, ship

from statescan import settings
from statescan.backends.cuda import cache, cubins, nvrtc, source
from statescan.backends.cuda.launch import launch
from statescan.errors import BackendUnavailableError

CUDA0 = torch.device("cuda", 0)
VALUES = (1, 2, 3)


def run(suffix="bf16"):
    launch("toy", suffix, CUDA0, (1, 1, 1), VALUES)


def loads(gpu):
    return [line.split()[1] for line in gpu.calls("cuLibraryLoadData") if "->" not in line]


def test_a_shipped_cubin_is_loaded_and_nothing_compiled(gpu, compiler):
    ship("sm_90")
    run("bf16")
    run("f32")
    assert loads(gpu) == ["cubin"], "one file has all instances"
    assert compiler.compiled == []


def test_a_lesser_architecture_of_the_same_major_serves(gpu, compiler):
    gpu.library.fake_capability(0, 8, 9)
    ship("sm_80", ELF + b"80")
    ship("sm_86", ELF + b"86")
    ship("sm_90", ELF + b"90")
    code = next(cubins.candidates(KERNEL, KERNEL.instances[0], (8, 9), []))
    assert code.data.endswith(b"86")
    run()
    assert compiler.compiled == []


def test_no_other_major_serves(gpu, compiler):
    ship("sm_80")
    ship("sm_100")
    run()
    assert compiler.compiled == [("statescan_toy__bf16", "sm_90")]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ({"source": "0" * 32}, "built from other sources"),
        ({"sha256": "0" * 64}, "is damaged"),
        ({"file": "gone.cubin"}, "cannot be read"),
    ],
)
def test_a_cubin_that_does_not_fit_is_passed_over_with_a_word(gpu, compiler, caplog, spoil, reason):
    ship("sm_90", **spoil)
    run("bf16")
    run("bf16")
    assert compiler.compiled == [("statescan_toy__bf16", "sm_90")]
    assert [reason in record.message for record in caplog.records] == [True]


def test_a_changed_source_gets_new_code(gpu, compiler, caplog):
    ship("sm_90")
    (source.FOLDER / "toy.cu").write_text("// another text\n")
    source._read_file.cache_clear()
    source.unit_hash.cache_clear()
    run()
    assert len(compiler.compiled) == 1


def test_a_manifest_of_another_schema_counts_as_none(gpu, compiler):
    ship("sm_90")
    path = cubins.FOLDER / "sm_90" / cubins.MANIFEST
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 99'))
    run()
    assert len(compiler.compiled) == 1


def test_a_driver_that_refuses_the_cubin_gets_a_compiled_one(gpu, compiler, caplog):
    ship("sm_90")
    gpu.fail("cuLibraryLoadData", 209, times=1)
    run()
    assert compiler.compiled == [("statescan_toy__bf16", "sm_90")]
    assert "because" in caplog.text


def test_shipped_ptx_is_the_last_resort(gpu, compiler, caplog):
    compiler.error = "no luck today"
    texts = {suffix: f"{PTX.decode()} {suffix}" for suffix in KERNEL.by_suffix}
    ship(cubins.PTX, json.dumps(texts).encode())
    run("bf16")
    run("f32")
    assert loads(gpu) == ["ptx", "ptx"], "one text an instance: a driver compiles all it gets"
    assert "no luck today" in caplog.text


def test_a_gpu_younger_than_the_compiler_gets_ptx_from_it(gpu, compiler):
    gpu.library.fake_capability(0, 12, 0)
    run()
    assert compiler.compiled == [("statescan_toy__bf16", "compute_100")]
    assert loads(gpu) == ["ptx"]


def test_when_nothing_serves_the_reasons_are_told(gpu, monkeypatch):
    reason = "there is no NVRTC in this test"
    monkeypatch.setattr(nvrtc, "status", lambda: nvrtc.NvrtcStatus(None, reason))
    with pytest.raises(BackendUnavailableError) as caught:
        run()
    message = str(caught.value)
    assert "statescan_toy__bf16" in message
    assert "compute capability 9.0" in message
    assert reason in message
    assert len(message.splitlines()) <= 6


def test_an_error_that_no_other_code_can_cure_is_raised_at_once(gpu, compiler):
    ship("sm_90")
    gpu.fail("cuLibraryLoadData", 2)
    with pytest.raises(Exception, match=r"cuLibraryLoadData failed: .* \(2\)"):
        run()
    assert compiler.compiled == []


def test_compiled_code_serves_the_next_process(gpu, compiler):
    run()
    clear()
    run()
    assert len(compiler.compiled) == 1
    assert len(loads(gpu)) == 2


@pytest.mark.parametrize("change", ["version", "text", "architecture", "flags"])
def test_what_decides_the_code_is_in_the_key(gpu, compiler, monkeypatch, change):
    run()
    clear()
    if change == "version":
        compiler.version = (12, 8)
    elif change == "architecture":
        gpu.library.fake_capability(0, 8, 0)
    elif change == "flags":
        monkeypatch.setattr(nvrtc, "FLAGS", (*nvrtc.FLAGS, "--other"))
    else:
        (source.FOLDER / "toy.cu").write_text("// another text\n")
        source._read_file.cache_clear()
    run()
    assert len(compiler.compiled) == 2


def cache_files():
    return [path for path in settings.cache_dir().rglob("*") if path.is_file()]


@pytest.mark.parametrize("damage", [b"", b"statescan-code-1", b"garbage"])
def test_a_damaged_cache_file_is_replaced(gpu, compiler, caplog, damage):
    run()
    (path,) = cache_files()
    whole = path.read_bytes()
    path.write_bytes(damage or whole[:-3])
    clear()
    run()
    assert len(compiler.compiled) == 2
    assert "damaged" in caplog.text
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_told_of_once(gpu, compiler, caplog, monkeypatch):
    # A file where the folder should be stops root too, whom no permission does.
    blocked = Path(settings.cache_dir())
    blocked.write_text("not a folder")
    run("bf16")
    run("f32")
    assert len(compiler.compiled) == 2
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("cannot be written" in line for line in told) == 1
    assert all("STATESCAN_CACHE_DIR" in line for line in told)


def test_a_user_without_home_has_no_cache_and_no_error(gpu, compiler, caplog, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("STATESCAN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    run()
    assert len(gpu.calls("cuLaunchKernel")) == 1
    assert "there is no cache folder" in caplog.text


def test_cache_folders_are_the_users_own(gpu):
    run()
    (path,) = cache_files()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


WRITER = """
import sys
from statescan.backends.cuda import cache
number = int(sys.argv[1])
for _ in range(100):
    cache.write("ab" * 32, bytes([number]) * 200_000)
    found = cache.read("ab" * 32)
    assert found is not None and len(found) == 200_000 and len(set(found)) == 1
"""


def test_many_processes_never_see_a_part_of_a_file(tmp_path):
    package = str(Path(cache.__file__).parents[3])
    env = {**os.environ, "STATESCAN_CACHE_DIR": str(tmp_path), "PYTHONPATH": package}
    command = [sys.executable, "-c", WRITER]
    writers = [subprocess.Popen([*command, str(n)], env=env) for n in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".bin"]


def test_keys_tell_parts_apart():
    assert cache.key_of(("ab", "c")) != cache.key_of(("a", "bc"))
    assert cache.key_of(("ab", "c")) == cache.key_of(("ab", "c"))
