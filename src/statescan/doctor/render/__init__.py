# SPDX-License-Identifier: Apache-2.0
"""How the doctor's results look in a terminal; nothing is computed here."""
