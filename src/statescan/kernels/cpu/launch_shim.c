/* SPDX-License-Identifier: Apache-2.0 */
/* Unpacks one launch request into a call of the CUDA driver's launch function. It knows no CUDA
 * header and links to no driver: the function's address comes with the request.
 *
 * Why it exists: ctypes converts each argument of each call, so cuLaunchKernel with its eleven
 * costs 1.4 to 4.8 us from Python, and one pointer to a packed request about 0.5 us. */
#include "abi.h"

int statescan_launch(const struct statescan_launch_request *request) {
    if (request->launch == NULL) {
        return STATESCAN_LAUNCH_NO_FUNCTION;
    }
    const void *params = request->params != NULL ? request->params : (const void *)(request + 1);
    /* The driver reads the struct during the call and never writes it, though its type says so. */
    void *kernel_params[1] = {(void *)params};
    return request->launch(request->kernel, request->grid_x, request->grid_y, request->grid_z,
                           request->block_x, request->block_y, request->block_z,
                           request->shared_bytes, request->stream, kernel_params, NULL);
}
