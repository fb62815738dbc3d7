# SPDX-License-Identifier: Apache-2.0
"""Text from a language model: prefill, single steps, whole continuations, streams.

No model is defined here.
"""

from statescan.generation.generate import (
    GenerationOutput,
    decode_one_token,
    generate,
    prefill,
    stream,
)
from statescan.generation.sampling import SamplingConfig
from statescan.generation.text import TextStream

__all__ = [
    "GenerationOutput",
    "SamplingConfig",
    "TextStream",
    "decode_one_token",
    "generate",
    "prefill",
    "stream",
]
