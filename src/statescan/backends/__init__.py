# SPDX-License-Identifier: Apache-2.0
"""How each backend runs each op: one folder a backend, one file an op, the ops' file names.

Which backend runs a call is decided in ``statescan.dispatch``, never here.
"""
