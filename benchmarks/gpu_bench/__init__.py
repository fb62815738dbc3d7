# SPDX-License-Identifier: Apache-2.0
"""The parts of ``gpu_peers.py`` and ``gpu_models.py``: rows, calls, gate, clocks, result files.

Nothing here is imported by the package.
"""
