/* The part of DLPack 1 that is used: how a tensor's memory is handed to torch, with a function that is called when torch is done
 * with it. These layouts are fixed for all of version 1.
 *
 * Source: https://dmlc.github.io/dlpack/latest/c_api.html
 */
#ifndef SHMRING_DLPACK_H
#define SHMRING_DLPACK_H

#include <stdint.h>

enum { ON_CPU = 1 };

typedef struct { uint32_t major, minor; } DLPackVersion;
typedef struct { int32_t device_type, device_id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;

typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

/* Travels in a capsule named "dltensor"; every torch takes it. */
typedef struct DLManagedTensor {
    DLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensor *);
} DLManagedTensor;

typedef struct DLManagedTensorVersioned {
    DLPackVersion version;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensorVersioned *);
    uint64_t flags;
    DLTensor dl_tensor;
} DLManagedTensorVersioned;

/* The table of functions behind `torch.Tensor.__dlpack_c_exchange_api__`, a capsule named "dlpack_exchange_api". */
typedef struct DLPackExchangeAPIHeader {
    DLPackVersion version;
    struct DLPackExchangeAPIHeader *prev_api; /* of an older version, or NULL */
} DLPackExchangeAPIHeader;

typedef struct {
    DLPackExchangeAPIHeader header;
    void *managed_tensor_allocator;
    void *managed_tensor_from_py_object;
    int (*managed_tensor_to_py_object)(DLManagedTensorVersioned *, void **);
    int (*dltensor_from_py_object)(void *, DLTensor *); /* borrowed: valid while the object is */
} DLPackExchangeAPI;

#endif
