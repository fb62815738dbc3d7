# SPDX-License-Identifier: Apache-2.0
"""What is taken out of a document before it is shown to others, and what stays."""

from __future__ import annotations

import time

import pytest

from statescan.doctor.redact import redactor

REDACT = redactor({"/home/bob": "~", "bob": "USER", "node17": "HOST"})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/bob/venv/bin/python", "~/venv/bin/python"),
        ("bob@node17:~$ pip install", "USER@HOST:~$ pip install"),
        ("/home/alice/x /Users/alice/y", "/home/USER/x /Users/USER/y"),
        ("C:\\Users\\Alice\\app", "C:\\Users\\USER\\app"),
        ("/scratch/alice/env /data1/alice/env", "/scratch/USER/env /data1/USER/env"),
        ("/gpfs/home/alice/env", "/gpfs/home/USER/env"),
        ("https://alice:s3cret@pypi.example.com/simple", "https://***@pypi.example.com/simple"),
        ("git+https://ghp_x@github.com/a/b", "git+https://***@github.com/a/b"),
        (
            "HTTP_PROXY=alice:s3cret@proxy.example.com:3128",
            "HTTP_PROXY=***@proxy.example.com:3128",
        ),
        ("curl --token abcd1234 x", "curl --token *** x"),
        ("HF_TOKEN=hf_abcdefghijklmnopqrst", "HF_TOKEN=***"),
        ("Authorization: Bearer abc.def.ghi", "Authorization: Bearer ***"),
        ("key ghp_abcdefghijklmnop1234 here", "key *** here"),
        ("write to alice.b@example.com now", "write to MAIL now"),
    ],
)
def test_taken_out(text, shown):
    assert REDACT(text) == shown
    assert REDACT(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "torch 2.7.1+cu128, CUDA 12.8, sm_90",
        "pip install 'causal-conv1d>=1.5.1' --no-build-isolation",
        "mamba-ssm @ file:///tmp/mamba_ssm-2.2.2-cp310-cp310-linux_x86_64.whl",
        "https://github.com/state-spaces/mamba/releases/download/v2.2.2/x.whl",
        "git@github.com:Dao-AILab/causal-conv1d.git",
        "/usr/lib/python3.11/site-packages/torch/lib/libc10.so: undefined symbol: _ZN3c10",
        "@torch.no_grad()",
        "tokenizers 0.21.4, tokenization of the prompt",
        "export PATH=$CUDA_HOME/bin:$PATH",
        "line 12: error: expected ';' before '}' token",
    ],
)
def test_left_alone(text):
    assert REDACT(text) == text


def test_whole_documents_are_redacted():
    document = {"path": "/home/bob/x", "rows": [{"bob": ("/Users/al/y", 3, None, True)}]}
    assert REDACT(document) == {"path": "~/x", "rows": [{"USER": ["/Users/USER/y", 3, None, True]}]}


def test_a_megabyte_of_lookalikes_ends_quickly():
    began = time.process_time()
    for piece in ("a:b@", "token=", "https://" + "x" * 200, "/home/" * 3, "x.y@z.", "-" * 40):
        REDACT(piece * (1_000_000 // len(piece)))
    assert time.process_time() - began < 30
