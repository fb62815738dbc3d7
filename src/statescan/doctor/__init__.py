# SPDX-License-Identifier: Apache-2.0
"""The doctor of Mamba installs: facts, checks, findings, plans, and readers of logs and binaries.

Standard library only, and no torch in this process: it must run where everything else is broken.
Facts never judge, checks never probe, renderers never compute; each stage can be fed a saved
document of the stage before it.
"""
