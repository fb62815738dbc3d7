# SPDX-License-Identifier: Apache-2.0
"""Training of byte-level models on a text file.

Command-line options live in ``cli.train``; the model in ``models``.
"""

from statescan.training.config import TrainConfig
from statescan.training.evaluate import bits_per_byte
from statescan.training.loop import TrainResult, train

__all__ = ["TrainConfig", "TrainResult", "bits_per_byte", "train"]
