# SPDX-License-Identifier: Apache-2.0
"""Language models: configuration, model, model folders, the byte tokenizer and the embedded model.

Generation and training are packages of their own.
"""

from statescan.models.checkpoint import load_model, save_model
from statescan.models.config import MambaConfig
from statescan.models.embedded import load_embedded
from statescan.models.lm import MambaBackbone, MambaLM, MambaOutput
from statescan.models.tokenizer import ByteDecoder, ByteTokenizer

__all__ = [
    "ByteDecoder",
    "ByteTokenizer",
    "MambaBackbone",
    "MambaConfig",
    "MambaLM",
    "MambaOutput",
    "load_embedded",
    "load_model",
    "save_model",
]
