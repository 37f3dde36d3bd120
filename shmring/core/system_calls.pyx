"""All functions of the system that the core calls. No other file declares a function of the C library that does more than
compute.

Beside these, parts cimport :mod:`posix.unistd`. ``tests/house/test_layers.py`` lists the parts that call the system, and why.
"""

cdef extern from "<sys/mman.h>" nogil:
    void* mmap(void*, size_t, int, int, int, long)
    int munmap(void*, size_t)
    int madvise(void*, size_t, int)
    int mprotect(void*, size_t, int)
    void* MAP_FAILED
    enum:
        PROT_NONE
        PROT_READ
        PROT_WRITE
        MAP_SHARED
        MAP_PRIVATE
        MAP_ANONYMOUS
        MAP_NORESERVE
        MAP_FIXED
        MAP_POPULATE
        MADV_DONTFORK

cdef extern from "<sys/socket.h>" nogil:
    ssize_t send(int, const void*, size_t, int)
    ssize_t recv(int, void*, size_t, int)
    int shutdown(int, int)
    enum:
        MSG_DONTWAIT
        MSG_NOSIGNAL
        SHUT_RDWR

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int)
    enum:
        EFD_CLOEXEC
        EFD_NONBLOCK

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd*, unsigned long, int)
    enum:
        POLLIN

cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*before)(), void (*in_parent)(), void (*in_child)())

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<time.h>" nogil:
    struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(int, timespec*)
    enum:
        CLOCK_MONOTONIC
