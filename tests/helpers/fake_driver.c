/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for the CUDA driver: two devices, no GPU. It keeps a line for each call that matters,
 * checks contexts as the driver does, and fails where a test asks it to. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { DEVICES = 2, LOG_BYTES = 1 << 20, RULES = 16, MOST_PARAMETERS = 1024 };
enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201 };
enum { INVALID_HANDLE = 400, NOT_FOUND = 500, CAPTURE_IMPLICIT = 906 };

static char calls[LOG_BYTES];
static size_t used;
static int driver_version = 12090;
static int initialised;
static int majors[DEVICES] = {9, 9};
static int minors[DEVICES] = {0, 0};
static int shared_limit = 232448;
static uintptr_t capturing;
static int capture_blocks_null;
static size_t parameter_bytes;
static unsigned char parameters[MOST_PARAMETERS];
static uintptr_t loads;
static __thread uintptr_t context;
static struct {
    char call[64];
    int code, left;
} rules[RULES];

static void note(const char *format, ...) {
    static int taken;
    va_list arguments;
    va_start(arguments, format);
    while (__atomic_exchange_n(&taken, 1, __ATOMIC_ACQUIRE)) {
    }
    int written = vsnprintf(calls + used, LOG_BYTES - used, format, arguments);
    va_end(arguments);
    if (written > 0 && used + (size_t)written + 1 < LOG_BYTES) {
        used += (size_t)written;
        calls[used++] = '\n';
        calls[used] = 0;
    }
    __atomic_store_n(&taken, 0, __ATOMIC_RELEASE);
}

static int rule(const char *call) {
    for (int i = 0; i < RULES; i++) {
        if (rules[i].left != 0 && strcmp(rules[i].call, call) == 0) {
            rules[i].left--;
            return rules[i].code;
        }
    }
    return SUCCESS;
}

#define BEGIN(call)                                                                                \
    do {                                                                                           \
        int code = rule(call);                                                                     \
        if (code != SUCCESS) {                                                                     \
            note("%s -> %d", call, code);                                                          \
            return code;                                                                           \
        }                                                                                          \
        if (!initialised) {                                                                        \
            return NOT_INITIALIZED;                                                                \
        }                                                                                          \
    } while (0)

/* For the tests. */
const char *fake_calls(void) {
    return calls;
}
const unsigned char *fake_parameters(void) {
    return parameters;
}
void fake_parameter_bytes(size_t bytes) {
    parameter_bytes = bytes;
}
void fake_version(int version) {
    driver_version = version;
}
void fake_capability(int device, int major, int minor) {
    majors[device] = major;
    minors[device] = minor;
}
void fake_shared_limit(int bytes) {
    shared_limit = bytes;
}
/* A stream that is being captured; the legacy stream cannot be asked meanwhile, if so wished. */
void fake_capture(uintptr_t stream, int blocks_null) {
    capturing = stream;
    capture_blocks_null = blocks_null;
}
/* The next `times` calls of one function fail with a code; -1 is always. */
void fake_fail(const char *call, int code, int times) {
    for (int i = 0; i < RULES; i++) {
        if (rules[i].left == 0) {
            snprintf(rules[i].call, sizeof rules[i].call, "%s", call);
            rules[i].code = code;
            rules[i].left = times;
            return;
        }
    }
}
void fake_lose_context(void) {
    context = 0;
}

/* The driver. Handles tell what they are: 0x1000 + device for contexts, then code, kernels and
 * functions, whose last digit is the device. */
int cuInit(unsigned flags) {
    int code = rule("cuInit");
    initialised = code == SUCCESS && flags == 0;
    return code;
}
int cuDriverGetVersion(int *version) {
    *version = driver_version;
    return SUCCESS;
}
int cuGetExportTable(const void **table, const void *id) {
    (void)id;
    *table = NULL;
    return NOT_FOUND;
}
int cuGetErrorName(int error, const char **text) {
    *text = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OF_THE_STAND_IN";
    return SUCCESS;
}
int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "made up";
    return SUCCESS;
}
int cuDeviceGet(int *device, int ordinal) {
    BEGIN("cuDeviceGet");
    *device = ordinal;
    return ordinal < 0 || ordinal >= DEVICES ? 101 : SUCCESS;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN("cuDeviceGetAttribute");
    switch (attribute) {
    case 75:
        *value = majors[device];
        return SUCCESS;
    case 76:
        *value = minors[device];
        return SUCCESS;
    case 97:
        *value = shared_limit;
        return SUCCESS;
    default:
        return INVALID_VALUE;
    }
}
int cuDevicePrimaryCtxRetain(uintptr_t *result, int device) {
    BEGIN("cuDevicePrimaryCtxRetain");
    note("cuDevicePrimaryCtxRetain %d", device);
    *result = 0x1000 + (uintptr_t)device;
    return SUCCESS;
}
int cuCtxGetCurrent(uintptr_t *result) {
    BEGIN("cuCtxGetCurrent");
    *result = context;
    return SUCCESS;
}
int cuCtxSetCurrent(uintptr_t wanted) {
    BEGIN("cuCtxSetCurrent");
    note("cuCtxSetCurrent %d", (int)(wanted - 0x1000));
    context = wanted;
    return SUCCESS;
}
int cuStreamIsCapturing(uintptr_t stream, int *status) {
    BEGIN("cuStreamIsCapturing");
    note("cuStreamIsCapturing %#lx", (unsigned long)stream);
    if (stream == 0 && capturing != 0 && capture_blocks_null) {
        return CAPTURE_IMPLICIT;
    }
    *status = capturing != 0 && stream == capturing;
    return SUCCESS;
}

static void note_load(const char *call, const char *data) {
    note("%s %s", call,
         memcmp(data,
                "\x7f"
                "ELF",
                4) == 0
             ? "cubin"
             : "ptx");
}
int cuLibraryLoadData(uintptr_t *library, const char *data, void *a, void *b, unsigned c, void *d,
                      void *e, unsigned f) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    BEGIN("cuLibraryLoadData");
    note_load("cuLibraryLoadData", data);
    *library = 0x2000 + 0x10 * ++loads;
    return SUCCESS;
}
int cuLibraryGetKernel(uintptr_t *kernel, uintptr_t library, const char *name) {
    BEGIN("cuLibraryGetKernel");
    note("cuLibraryGetKernel %s", name);
    *kernel = 0x10000 + library;
    return SUCCESS;
}
int cuKernelGetFunction(uintptr_t *function, uintptr_t kernel) {
    BEGIN("cuKernelGetFunction");
    if (context == 0) {
        return INVALID_CONTEXT;
    }
    *function = 0x100000 + kernel + (context - 0x1000);
    return SUCCESS;
}
int cuKernelSetAttribute(int attribute, int value, uintptr_t kernel, int device) {
    (void)kernel;
    BEGIN("cuKernelSetAttribute");
    note("cuKernelSetAttribute %d %d on %d", attribute, value, device);
    return value > shared_limit ? INVALID_VALUE : SUCCESS;
}
int cuModuleLoadData(uintptr_t *module, const char *data) {
    BEGIN("cuModuleLoadData");
    if (context == 0) {
        return INVALID_CONTEXT;
    }
    note_load("cuModuleLoadData", data);
    *module = 0x2000 + 0x10 * ++loads + (context - 0x1000);
    return SUCCESS;
}
int cuModuleGetFunction(uintptr_t *function, uintptr_t module, const char *name) {
    BEGIN("cuModuleGetFunction");
    note("cuModuleGetFunction %s", name);
    *function = 0x110000 + module;
    return SUCCESS;
}
int cuFuncSetAttribute(uintptr_t function, int attribute, int value) {
    BEGIN("cuFuncSetAttribute");
    note("cuFuncSetAttribute %d %d on %d", attribute, value, (int)(function & 0xf));
    return value > shared_limit ? INVALID_VALUE : SUCCESS;
}
int cuLaunchKernel(uintptr_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                   unsigned by, unsigned bz, unsigned shared, uintptr_t stream, void **arguments,
                   void **extra) {
    (void)extra;
    BEGIN("cuLaunchKernel");
    if (context == 0) {
        return INVALID_CONTEXT;
    }
    if ((function & 0xf) != context - 0x1000) {
        return INVALID_HANDLE;
    }
    memcpy(parameters, arguments[0], parameter_bytes);
    note("cuLaunchKernel on %d stream %#lx grid %u,%u,%u block %u,%u,%u shared %u",
         (int)(context - 0x1000), (unsigned long)stream, gx, gy, gz, bx, by, bz, shared);
    return SUCCESS;
}
