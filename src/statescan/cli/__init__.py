# SPDX-License-Identifier: Apache-2.0
"""The command line: one module a command, each with ``configure_parser`` and ``execute``.

Nothing is computed here: commands read options, call the layers below and print.
"""
