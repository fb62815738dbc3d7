# SPDX-License-Identifier: Apache-2.0
"""The name mamba_ssm, served by statescan."""

from statescan.compat.aliases import serve

serve(__name__)
