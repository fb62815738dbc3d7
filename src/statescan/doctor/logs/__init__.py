# SPDX-License-Identifier: Apache-2.0
"""From the output of a failed install, build or import to its cause.

Signatures are data of the catalogue (``patterns_*.json``); what needs several lines is in
``rules_*``.
"""
