/* The part of CUDA's driver interface that is used for every copy: called by address, so that nothing is linked against it. These
 * signatures are those of CUDA 11 and later; the names end as the driver's library exports them.
 *
 * Source: https://docs.nvidia.com/cuda/cuda-driver-api/
 */
#ifndef SHMRING_CUDA_DRIVER_H
#define SHMRING_CUDA_DRIVER_H

#include <stddef.h>

typedef struct { char reserved[64]; } CUipcEventHandle; /* passed by value */

typedef struct {
    int (*cuCtxPushCurrent_v2)(void *context);
    int (*cuCtxPopCurrent_v2)(void **context);
    int (*cuMemcpyHtoDAsync_v2)(unsigned long long target, const void *source, size_t nbytes, void *stream);
    int (*cuEventCreate)(void **event, unsigned int flags);
    int (*cuEventRecord)(void *event, void *stream);
    int (*cuEventSynchronize)(void *event);
    int (*cuStreamWaitEvent)(void *stream, void *event, unsigned int flags);
    int (*cuStreamQuery)(void *stream);
    int (*cuEventQuery)(void *event);
    int (*cuIpcGetEventHandle)(CUipcEventHandle *handle, void *event);
    int (*cuIpcOpenEventHandle)(void **event, CUipcEventHandle handle);
    int (*cuGetErrorString)(int code, const char **text);
} DriverCalls;

enum { CU_EVENT_BLOCKING_SYNC = 1, CU_EVENT_DISABLE_TIMING = 2, CU_EVENT_INTERPROCESS = 4 };
enum { CUDA_ERROR_NOT_READY = 600 };

#endif
