# SPDX-License-Identifier: Apache-2.0
"""Writes ``compose.yaml``: the service of the written Dockerfile, with the GPU where one is used.

What is in the image is ``dockerfile``'s matter.
"""

from __future__ import annotations

from statescan.doctor.generate import comments
from statescan.doctor.generate.choices import Choices

FILE = "compose.yaml"

_PURPOSE = (
    "Compose file. It builds the Dockerfile beside it, which `statescan write dockerfile` makes "
    "for the same target."
)
_SERVICE = """
name: {name}
services:
  app:
    build:
      context: .
      dockerfile: Dockerfile
    image: {name}
    # An init process passes signals on, so that Ctrl-C stops the program at once.
    init: true
    # PyTorch's data loaders exchange batches through /dev/shm, 64 MB by default.
    shm_size: 2gb
    volumes:
      # Compiled kernels stay from one run to the next.
      - cache:/home/app/.cache
"""
_GPU = """\
    # Needs the NVIDIA Container Toolkit on the host. Without this block no GPU is seen.
    deploy:
      resources:
        reservations:
          devices:
            - driver: nvidia
              count: all
              capabilities: [gpu]
"""


def write(choices: Choices) -> str:
    """The file's text."""
    head = "\n".join(comments.head("compose", choices, _PURPOSE, FILE)) + "\n"
    gpu = _GPU if choices.gpu else ""
    return head + _SERVICE.format(name=choices.name) + gpu + "volumes:\n  cache:\n"
