"""The functions of CUDA's driver that ``gpu.pyx`` and ``copies.pyx`` call; see cuda_driver.h."""

cdef extern from "cuda_driver.h" nogil:
    ctypedef struct CUipcEventHandle:
        char reserved[64]
    ctypedef struct DriverCalls:
        int (*cuCtxPushCurrent_v2)(void*) noexcept nogil
        int (*cuCtxPopCurrent_v2)(void**) noexcept nogil
        int (*cuMemcpyHtoDAsync_v2)(unsigned long long, const void*, size_t, void*) noexcept nogil
        int (*cuEventCreate)(void**, unsigned int) noexcept nogil
        int (*cuEventRecord)(void*, void*) noexcept nogil
        int (*cuEventSynchronize)(void*) noexcept nogil
        int (*cuStreamWaitEvent)(void*, void*, unsigned int) noexcept nogil
        int (*cuStreamQuery)(void*) noexcept nogil
        int (*cuEventQuery)(void*) noexcept nogil
        int (*cuIpcGetEventHandle)(CUipcEventHandle*, void*) noexcept nogil
        int (*cuIpcOpenEventHandle)(void**, CUipcEventHandle) noexcept nogil
        int (*cuGetErrorString)(int, const char**) noexcept nogil
    enum:
        CU_EVENT_BLOCKING_SYNC
        CU_EVENT_DISABLE_TIMING
        CU_EVENT_INTERPROCESS
        CUDA_ERROR_NOT_READY
