# SPDX-License-Identifier: Apache-2.0
"""The ordered ways to a working package on given facts; nothing is done, only said."""
