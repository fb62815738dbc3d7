# SPDX-License-Identifier: Apache-2.0
"""Language models: configuration, model, checkpoints, tokenizers and the embedded model.

Generation and training are packages of their own.
"""

from statescan.models.checkpoint import load_model, save_model
from statescan.models.config import MambaConfig
from statescan.models.embedded import load_embedded
from statescan.models.lm import MambaBackbone, MambaLM, MambaOutput
from statescan.models.text_tokenizer import TextTokenizer, TokenDecoder, load_tokenizer
from statescan.models.tokenizer import ByteDecoder, ByteTokenizer

__all__ = [
    "ByteDecoder",
    "ByteTokenizer",
    "MambaBackbone",
    "MambaConfig",
    "MambaLM",
    "MambaOutput",
    "TextTokenizer",
    "TokenDecoder",
    "load_embedded",
    "load_model",
    "load_tokenizer",
    "save_model",
]
