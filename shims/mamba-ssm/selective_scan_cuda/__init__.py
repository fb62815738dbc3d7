# SPDX-License-Identifier: Apache-2.0
"""The name selective_scan_cuda, served by statescan."""

from statescan.compat.aliases import serve

serve(__name__)
