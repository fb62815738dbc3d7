# SPDX-License-Identifier: Apache-2.0
"""Compiles the CUDA kernels to cubins with the pinned NVRTC, and judges what came out.

    scripts/build_cubins            all kernels for all architectures, into the package
    scripts/build_cubins --check    the same, then compares them with scripts/cubin_record.json
    scripts/build_cubins --sample   what CI does: see below
    scripts/build_cubins --arch sm_90 --stem X --out DIR    some of it, elsewhere

The compilers come from PyPI:

    pip install nvidia-cuda-nvrtc-cu{11==11.8.89,12==12.9.86} nvidia-cuda-nvrtc==13.0.88

All of it takes 20 minutes of one core. The record says of which sources it is, so an unchanged
kernel need not be compiled again to be judged: `--sample` demands a record of these sources for
every architecture, and compiles one of them, another each day, to hold it to account.

Which kernels there are is said in `statescan.backends.cuda.tables`, how their text is joined in
`source`; neither belongs here. No GPU, no driver and no torch is used.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import date
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# The sources of this checkout, whatever version is installed.
sys.path.insert(0, str(ROOT / "src"))

import cubin_gates  # noqa: E402  (after the path above)
from cubin_elf import Cubin  # noqa: E402

from statescan.backends.cuda import nvrtc, source, tables  # noqa: E402
from statescan.backends.cuda.cubins import (  # noqa: E402
    COMPRESSED,
    FOLDER,
    MANIFEST,
    PTX,
    SCHEMA,
    unpacked,
)
from statescan.backends.cuda.tables.base import Kernel  # noqa: E402

CUDA_12 = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
COMPILER_OF = {
    **dict.fromkeys((*CUDA_12, "sm_121"), (12, 9)),
    "sm_110": (13, 0),
    PTX: (11, 8),
}
"""The compiler of each architecture. Drivers refuse the binaries of a later CUDA major, and PTX of
any later compiler: 13.x would shut out every driver before 580."""

PACKAGES = {
    (11, 8): "nvidia-cuda-nvrtc-cu11==11.8.89",
    (12, 9): "nvidia-cuda-nvrtc-cu12==12.9.86",
    (13, 0): "nvidia-cuda-nvrtc==13.0.88",
}


def main() -> int:
    """Compile what was asked for; 1 if a gate fails."""
    options = arguments()
    stale = cubin_gates.stems_of_other_sources(list(COMPILER_OF), options.stem)
    if options.sample and stale:
        print(*(f"gate: {line}" for line in stale), sep="\n", file=sys.stderr)
        print("hint: scripts/build_cubins --record", file=sys.stderr)
        return 1
    rows = compile_all(options)
    built = [row for row in rows if "record" in row]
    problems = [line for row in rows for line in row["problems"]]
    if len(built) == len(rows) and (options.check or options.record or options.sample):
        problems += cubin_gates.check(options.out, options.arch, options.stem, options.record)
    for line in problems:
        print(f"gate: {line}", file=sys.stderr)
    return 1 if problems else 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/build_cubins", description="Compile the CUDA kernels to cubins."
    )
    add = parser.add_argument
    add("--arch", action="append", choices=list(COMPILER_OF), help="repeatable; all by default")
    add("--stem", action="append", help="name of a kernel; repeatable; all by default")
    add("--out", type=Path, help="folder of the architectures' folders; not compressed there")
    add("--nvrtc", action="append", type=Path, default=[], help="where a compiler lies; repeatable")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    add("--force", action="store_true", help="compile also what is there and up to date")
    add("--check", action="store_true", help="fail on spills or growth beyond the record")
    add("--sample", action="store_true", help="check the record, and one architecture against it")
    add("--record", action="store_true", help="take what comes out as what to compare with")
    options = parser.parse_args()
    options.compress = options.out is None
    options.out = options.out or FOLDER
    options.arch = options.arch or (sampled() if options.sample else list(COMPILER_OF))
    options.stem = options.stem or list(tables.stems())
    return options


def sampled() -> list[str]:
    """One architecture, another each day."""
    names = list(COMPILER_OF)
    return [names[date.today().toordinal() % len(names)]]


class Task(NamedTuple):
    """One kernel for one architecture."""

    architecture: str
    stem: str
    options: argparse.Namespace

    @property
    def target(self) -> Path:
        """The file that is made."""
        ending = ".ptx.json" if self.architecture == PTX else ".cubin"
        if self.options.compress:
            ending += COMPRESSED
        return self.options.out / self.architecture / f"{self.stem}{ending}"


def compile_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compile every (architecture, kernel), in as many processes as asked for."""
    # The longest first, so that none of them is left over for one process at the end.
    stems = sorted(options.stem, key=lambda stem: -len(tables.kernel(stem).instances))
    tasks = [Task(arch, stem, options) for stem in stems for arch in options.arch]
    if options.jobs == 1 or len(tasks) == 1:
        return [told(compile_one(task), options) for task in tasks]
    with ProcessPoolExecutor(options.jobs) as pool:
        return [told(row, options) for row in pool.map(compile_one, tasks)]


def told(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The row, after a line about it, and in the manifest: what is stopped loses nothing."""
    print(f"{row['architecture']:10} {row['stem']:24} {row.get('summary', 'failed')}", flush=True)
    if "record" in row:
        write_manifest(options.out / row["architecture"], row["architecture"], [row])
    return row


def compile_one(task: Task) -> dict[str, Any]:
    """Compile one kernel for one architecture unless that is there already."""
    kernel, target = tables.kernel(task.stem), task.target
    row: dict[str, Any] = {"architecture": task.architecture, "stem": task.stem, "problems": []}
    record: dict[str, Any] = {
        "source": source.unit_hash(kernel),
        "compiler": list(COMPILER_OF[task.architecture]),
        "flags": list(nvrtc.FLAGS),
    }
    kernels = {} if task.options.force else manifest_of(target.parent).get("kernels", {})
    start = time.perf_counter()
    kept = is_current(kernels.get(task.stem, {}), record, target)
    if not kept:
        try:
            code = compiled(task, kernel)
        except nvrtc.CompileError as error:
            return row | {"problems": [str(error)]}
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(lzma.compress(code) if task.options.compress else code)
    stored = target.read_bytes()
    data = unpacked(target.name, stored)
    record |= {"file": target.name, "sha256": sha256(stored).hexdigest(), "bytes": len(data)}
    record |= {"struct_bytes": kernel.packer.size, "instances": instances_of(kernel)}
    if task.architecture != PTX:
        cubin = Cubin(data)
        for suffix, instance in kernel.by_suffix.items():
            found = cubin.kernels().get(kernel.symbol(instance))
            record["instances"][suffix] |= {} if found is None else asdict(found)
        row["problems"] = cubin_gates.judge(kernel, task.architecture, cubin)
    how = "kept" if kept else f"{time.perf_counter() - start:.1f} s"
    return row | {"record": record, "summary": summary(record, how)}


def compiled(task: Task, kernel: Kernel) -> bytes:
    """A cubin with all instances, or PTX by instance, since a driver compiles all it is given."""
    compiler = compiler_of(task.architecture, tuple(task.options.nvrtc))
    compiler.compile(source.layout_check(kernel), f"{task.stem}_layout", task.architecture)
    if task.architecture != PTX:
        done = compiler.compile(source.unit(kernel), task.stem, task.architecture)
        # CUDA 12.9 says at every compilation for sm_70 that there will be an end to it.
        log = [line for line in done.log.splitlines() if "deprecated" not in line]
        if log:
            print(f"{task.architecture} {task.stem}:", *log, sep="\n", file=sys.stderr)
        return done.code
    texts = {}
    for instance in kernel.instances:
        unit = source.unit(kernel, (instance,))
        done = compiler.compile(unit, kernel.symbol(instance), task.architecture)
        texts[instance.suffix] = done.code.rstrip(b"\0").decode()
    return json.dumps(texts).encode()


def instances_of(kernel: Kernel) -> dict[str, dict[str, Any]]:
    """How each instance is launched."""
    return {
        instance.suffix: {
            "symbol": kernel.symbol(instance),
            "threads": instance.threads,
            "dynamic_shared_bytes": instance.shared_bytes,
        }
        for instance in kernel.instances
    }


def summary(record: dict[str, Any], how: str) -> str:
    """One line for people."""
    rows = record["instances"].values()
    most = {
        key: max((row.get(key, 0) for row in rows), default=0)
        for key in ("registers", "local_bytes")
    }
    return (
        f"{len(rows):3} instances {record['bytes']:8} bytes, registers <= {most['registers']}, "
        f"local <= {most['local_bytes']} ({how})"
    )


def is_current(known: dict[str, Any], record: dict[str, Any], target: Path) -> bool:
    """Whether the file there is what a compilation would give."""
    if not target.is_file() or any(known.get(key) != value for key, value in record.items()):
        return False
    return known.get("sha256") == sha256(target.read_bytes()).hexdigest()


@lru_cache(maxsize=4)
def compiler_of(architecture: str, places: tuple[Path, ...]) -> nvrtc.Nvrtc:
    """The pinned compiler of an architecture, from the given places or from site-packages.

    Raises:
        SystemExit: it is not there.
    """
    wanted = COMPILER_OF[architecture]
    seen = []
    for path in (*within(places), *nvrtc.candidates()):
        compiler = nvrtc.Nvrtc(path)
        if compiler.version == wanted:
            return compiler
        seen.append(f"{path} is {compiler.version}")
    raise SystemExit(
        f"{architecture} is compiled by NVRTC {wanted[0]}.{wanted[1]}, which is not here "
        f"({'; '.join(seen) or 'there is no NVRTC'}).\nhint: pip install {PACKAGES[wanted]}"
    )


def within(places: tuple[Path, ...]) -> Iterable[Path]:
    """Compilers in the given folders, at any depth."""
    for place in places:
        found = [place] if place.is_file() else sorted(place.rglob("libnvrtc.so.*"))
        yield from (path for path in found if ".alt." not in path.name)


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of an architecture's folder, empty where there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found if found.get("schema") == SCHEMA else {}


def write_manifest(folder: Path, architecture: str, built: list[dict[str, Any]]) -> None:
    """Write what the folder holds; kernels that are no more leave it with their files."""
    kernels = manifest_of(folder).get("kernels", {})
    kernels |= {row["stem"]: row["record"] for row in built if row["architecture"] == architecture}
    kernels = {stem: record for stem, record in sorted(kernels.items()) if stem in tables.stems()}
    # Files of kernels that are no more; others of this run may be in the making.
    for path in folder.glob("*"):
        if path.name.partition(".")[0] not in (*tables.stems(), MANIFEST.partition(".")[0]):
            path.unlink()
    manifest = {"schema": SCHEMA, "architecture": architecture, "kernels": kernels}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(manifest, indent=1) + "\n"
    # At once: other processes look into it.
    written = folder / f"{MANIFEST}.new"
    written.write_text(text, encoding="utf-8")
    written.replace(folder / MANIFEST)


if __name__ == "__main__":
    sys.exit(main())
