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
        ("http://alice:pa/ss@host.org/x", "http://***@host.org/x"),
        ("http://alice:p@ss@host.org/simple", "http://***@host.org/simple"),
        ("http_proxy=http://bob:p:w@proxy:3128", "http_proxy=http://***@proxy:3128"),
        ("GITHUB_TOKEN=" + "a1" * 200, "GITHUB_TOKEN=***"),
        ("HF_TOKEN=hf_x9", "HF_TOKEN=***"),
        ('API_KEY="my secret value"', 'API_KEY="***"'),
        ("PASSWORD='a b c'", "PASSWORD='***'"),
        ("password = hunter2", "password = ***"),
        ("password: hunter2", "password: ***"),
        ('Authorization: Digest username="bob", response="6629"', "Authorization: Digest ***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("aws_secret_access_key=wJalrX/K7MDENG/bPxRfi", "aws_secret_access_key=***"),
        ("machine a.org login carl password s3cr3t", "machine a.org login carl password ***"),
        ("curl -u carl:hunter2 https://x", "curl -u carl:*** https://x"),
        ("Cookie: session=abc123", "Cookie: ***"),
        (r"c:\users\carl\x", r"c:\users\USER\x"),
        ("mail bob.smith@corp.example.com.", "mail MAIL."),
        ("contact bob@corp.com: now", "contact MAIL: now"),
        ("server 203.0.113.7:8080", "server IP:8080"),
        ("connect to 2001:db8::8a2e:370:7334 failed", "connect to IP failed"),
        ("inet6 fe80::1", "inet6 IP"),
        ("carl@workstation:~/x$ ls", "USER@HOST:~/x$ ls"),
        ("(base) carl@gpu-box:~$ pip", "(base) USER@HOST:~$ pip"),
        ('{"api_key": "v4lue", "user": "carl"}', '{"api_key": "***", "user": "USER"}'),
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
        "docker run -u 1000:1000 image",
        "npm i pkg@1.2.3",
        "git+https://github.com/a/b@v1.2.3",
        "/data/models/x",
        "unexpected token abcd",
        "sk-learn-contrib",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "12:34:56.789 at::Tensor c10::Error std::__cxx11::basic_string<char>",
        "driver 550.54.14, version 1.2.3.4",
        "--index-url https://download.pytorch.org/whl/cu121",
    ],
)
def test_left_alone(text):
    assert REDACT(text) == text


def test_whole_documents_are_redacted():
    document = {"path": "/home/bob/x", "rows": [{"bob": ("/Users/al/y", 3, None, True)}]}
    assert REDACT(document) == {"path": "~/x", "rows": [{"USER": ["/Users/USER/y", 3, None, True]}]}


PIECES = (
    *("a:b@", "token=", "https://" + "x" * 200, "/home/" * 3, "x.y@z.", "-" * 40, "a_-", "0", "'"),
    *("password ", "bob@h:", "1.", "::", "ghp_", "Bearer ", '{"a":', "login a password ", "-u a:"),
    *("://", "@", "%", "u:p@h/", "2001:", "cookie: "),
)


def test_a_megabyte_of_lookalikes_ends_quickly():
    began = time.process_time()
    for piece in PIECES:
        REDACT(piece * (1_000_000 // len(piece)))
    assert time.process_time() - began < 30
