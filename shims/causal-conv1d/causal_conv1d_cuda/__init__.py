# SPDX-License-Identifier: Apache-2.0
"""The name causal_conv1d_cuda, served by statescan."""

from statescan.compat.aliases import serve

serve(__name__)
