# SPDX-License-Identifier: Apache-2.0
"""Modules with parameters and wiring: the Mamba mixer, its block, norms and state caches.

Which kernel runs is decided below ``statescan.ops``, never here.
"""

from statescan.nn.block import Block
from statescan.nn.cache import InferenceCache, LayerCache
from statescan.nn.mamba import Mamba
from statescan.nn.norm import LayerNorm, RMSNorm

__all__ = ["Block", "InferenceCache", "LayerCache", "LayerNorm", "Mamba", "RMSNorm"]
