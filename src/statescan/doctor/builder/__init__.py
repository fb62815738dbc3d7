# SPDX-License-Identifier: Apache-2.0
"""Runs the originals' own source build in stages: checked before, watched, and proved after.

Nothing is compiled by this package itself, and no text is laid out here.
"""
