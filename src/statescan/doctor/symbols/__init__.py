# SPDX-License-Identifier: Apache-2.0
"""Reads compiled extension modules and wheels without loading them, and judges what was read.

``report`` gathers and ``judge`` decides; the readers of single formats know nothing of torch.
"""
