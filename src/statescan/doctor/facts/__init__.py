# SPDX-License-Identifier: Apache-2.0
"""What is observed of a machine: probes by area, and ``gather`` that runs them.

No value is judged here; what it means is for ``checks``.
"""
