# SPDX-License-Identifier: Apache-2.0
"""Which backend runs a call, and why: argument, then context manager, environment, automatic order.

No kernels here and no tensors: decisions are taken on ``OpRequest``.
"""

from statescan.backends.base import Backend, OpRequest, Support
from statescan.dispatch.explain import Explanation, explain_request
from statescan.dispatch.registry import all_backends, backend_named
from statescan.dispatch.select import select, use_backend

__all__ = [
    "Backend",
    "Explanation",
    "OpRequest",
    "Support",
    "all_backends",
    "backend_named",
    "explain_request",
    "select",
    "use_backend",
]
