"""A driver of CUDA that is made up: its functions, by their addresses, on streams that stop where a test wants them to.

What a real one would do at some later moment, this one does when its stream is let run: a copy from pinned memory reads its source
then, and not when it is queued, so a slot that is reused too early shows as wrong bytes. It refuses what a GPU refuses: a call outside
of a context, a copy across two registrations, an event that is opened twice. And any call can be made to fail.

The interpreter's lock guards all of it, which every function takes; who waits for an event waits without it. It is compiled so that
figures are not those of what is made up.
"""

import threading
from collections import Counter, deque

from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcpy
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize

cdef extern from "cuda_driver.h" nogil:
    ctypedef struct CUipcEventHandle:
        char reserved[64]

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_cond_init(pthread_cond_t*, void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_cond_wait(pthread_cond_t*, pthread_mutex_t*)
    int pthread_cond_broadcast(pthread_cond_t*)

cdef enum:
    NOT_READY = 600
    INVALID = 1
    INVALID_CONTEXT = 201
    MADE_TO_FAIL = 999
    _DEEPEST = 8

cdef pthread_mutex_t _mutex   # of all events; never held while the interpreter's lock is waited for
cdef pthread_cond_t _reached
pthread_mutex_init(&_mutex, NULL)
pthread_cond_init(&_reached, NULL)

cdef extern from *:
    """
    static _Thread_local void *contexts[8];
    static _Thread_local int depth;
    static _Thread_local void *chosen;
    """
    void** contexts
    int depth
    void* chosen   # a stream, which its driver keeps; NULL: none

cdef class Event:
    """Reached or not."""

    cdef readonly int device_index
    cdef readonly long recorded   # how often
    cdef long came                # the last of these that was reached
    cdef MadeUpDriver driver

    @property
    def reached(self):
        return self

    def is_set(self):
        return self.came == self.recorded

    def wait(self, timeout):
        """Returns whether it was reached; gives up after about so many seconds."""
        for _ in range(int(timeout * 1000)):
            if self.is_set():
                return True
            threading.Event().wait(0.001)
        return self.is_set()

    cdef int reach(self, long number) except -1:
        with nogil:
            pthread_mutex_lock(&_mutex)
            self.came = max(self.came, number)
            pthread_cond_broadcast(&_reached)
            pthread_mutex_unlock(&_mutex)
        return 0

    def __hash__(self):
        return <uintptr_t><void*>self >> 4


cdef class Recorded:
    """An event that is to be reached."""

    cdef readonly Event event
    cdef readonly long number


cdef class Stream:
    """What is queued: work, events to be reached, ``(event, times it was recorded)`` to wait for. Runs by itself unless it is held."""

    cdef readonly int device_index
    cdef public bint held
    cdef public object queue
    cdef MadeUpDriver driver

    @property
    def cuda_stream(self):
        return <uintptr_t><void*>self


cdef class _Copy:
    """A copy that is queued: by address, as a GPU reads. A reference would keep the slot that nobody else keeps."""

    cdef uint64_t target
    cdef uint64_t source
    cdef uint64_t nbytes
    cdef bytes read    # of pageable memory, before the call returned

    cdef void make(self) noexcept:
        memcpy(<void*>self.target, <void*>self.source, self.nbytes)


cdef class MadeUpDriver:
    """Streams, events and calls of one test.

    Attributes:
        registered: address to size, of what is pinned.
        calls: how often each call was made.
        devices: devices that were touched.
            copied: address and bytes of each copy.
        copy_threads: that have queued copies.
        before_copies: is called before each copy is queued.
        forgets_copies: whether copies are said to be queued, and are not.
        awaited: events that threads sleep for at this moment.
        exported, opened: events handed to other processes, and taken from them.
    """

    cdef readonly dict registered
    cdef public object calls
    cdef readonly set devices
    cdef readonly list streams
    cdef readonly list copied
    cdef readonly set copy_threads
    cdef public object before_copies
    cdef public bint forgets_copies
    cdef readonly set awaited
    cdef readonly dict exported
    cdef readonly set opened
    cdef dict _failures
    cdef dict _computing   # by device
    cdef list _events
    cdef list _contexts
    cdef object _lock
    cdef bint _is_running
    cdef bint _again

    def __init__(self):
        self.registered, self.exported, self._failures, self._computing = {}, {}, {}, {}
        self.devices, self.copy_threads, self.awaited, self.opened = set(), set(), set(), set()
        self.streams, self.copied, self._events, self._contexts = [], [], [], []
        self.calls, self._lock = Counter(), threading.RLock()
        _drivers.append(self)

    def fail(self, call, times=1):
        """Makes the next calls of a name fail."""
        self._failures[call] = times

    def fail_after(self, call, times):
        """Makes the one call fail that comes after so many others of that name."""
        self._failures[call] = -times

    def context(self, device_index):
        """Returns the context of a device."""
        cdef _Context made = _Context.__new__(_Context)
        made.driver, made.device_index = self, device_index
        self._contexts.append(made)
        return <uintptr_t><void*>made

    def create(self, device_index, held):
        """Returns a new stream."""
        cdef Stream stream = Stream.__new__(Stream)
        stream.device_index, stream.held, stream.queue, stream.driver = device_index, held, deque(), self
        self.streams.append(stream)
        return stream

    def compute_on(self, Stream stream: Stream | None):
        """Makes a stream this thread's current one; None: the one it had at first."""
        global chosen
        chosen = NULL if stream is None else <void*>stream

    cpdef Stream computing(self, int device_index=0):
        """Returns this thread's current stream."""
        if chosen != NULL and (<Stream>chosen).driver is self and (<Stream>chosen).device_index == device_index:
            return <Stream>chosen
        if device_index not in self._computing:
            self._computing[device_index] = self.create(device_index, False)
        return self._computing[device_index]

    def current_stream(self, int device_index):
        """Returns the number of the stream that this thread computes on."""
        if self.has_failed("current_stream", device_index):
            self.refuse("current_stream", MADE_TO_FAIL)
        return self.computing(device_index).cuda_stream

    def refuse(self, call, code):
        """Raises the error of a failed call; for the subclass."""
        raise NotImplementedError

    cpdef Event create_event(self, int device_index):
        cdef Event event = Event.__new__(Event)
        event.device_index, event.driver = device_index, self
        self._events.append(event)
        return event

    cpdef bint has_failed(self, str name, int device_index):
        """Counts a call; returns whether it is to fail."""
        self.calls[name] += 1
        self.devices.add(device_index)
        if not self._failures or not (times := self._failures.get(name)):
            return False
        self._failures[name] = times - 1 if times > 0 else times + 1 or 1
        return times > 0

    cpdef queue_work(self, Stream stream, work):
        """Queues work on a stream, as a kernel is queued."""
        if not stream.queue and not stream.held and type(work) is _Copy:
            (<_Copy>work).make()
            return
        with self._lock:
            stream.queue.append(work)
        self.run()

    cdef int record_event(self, Stream stream, Event event) except -1:
        cdef Recorded recorded
        event.recorded += 1
        if not stream.queue and not stream.held:
            event.came = event.recorded
            return 0
        recorded = Recorded.__new__(Recorded)
        recorded.event, recorded.number = event, event.recorded
        self.queue_work(stream, recorded)
        return 0

    cpdef run(self):
        """Runs streams as far as they go."""
        with self._lock:
            if self._is_running:
                self._again = True
                return
            self._is_running = True
            try:
                while True:
                    self._again = False
                    moved = [stream for stream in self.streams if self._step(stream)]
                    if not moved and not self._again:
                        break
            finally:
                self._is_running = False

    cdef bint _step(self, Stream stream) except -1:
        cdef bint moved = False
        while stream.queue and not stream.held:
            work = stream.queue[0]
            if type(work) is tuple:
                if (<Event>work[0]).came < work[1]:
                    return moved
            elif type(work) is Recorded:
                (<Recorded>work).event.reach((<Recorded>work).number)
            elif type(work) is _Copy:
                (<_Copy>work).make()
            else:
                work()
            stream.queue.popleft()
            moved = True
        return moved

    def release(self, *streams):
        """Lets streams run, all of them if none is given."""
        with self._lock:
            for stream in streams or tuple(self.streams):
                stream.held = False
        self.run()

    def advance(self, Stream stream):
        """Runs a held stream as far as its next event, if it has one."""
        with self._lock:
            if not any(type(work) is Recorded for work in stream.queue):
                return
            while type(work := stream.queue[0]) is not Recorded:
                stream.held = False
                tail = deque(list(stream.queue)[1:])
                stream.queue = deque([work])
                assert self._step(stream), "it waits for another stream"
                stream.queue = tail
            stream.queue.popleft()
            stream.held = True
            (<Recorded>work).event.reach((<Recorded>work).number)
        self.run()

    cpdef Event record(self, Stream stream):
        """Returns a new event behind all that is queued in a stream."""
        event = self.create_event(stream.device_index)
        self.record_event(stream, event)
        return event

    cdef int is_pinned(self, uint64_t start, uint64_t nbytes) except -1:
        """Whether these bytes are pinned; 2: only some of them are, or by two calls."""
        for address, length in self.registered.items():
            if address < start + nbytes and start < address + length:
                return 1 if address <= start and start + nbytes <= address + length else 2
        return 0

    @property
    def functions(self):
        """The addresses of the driver's functions, by name."""
        return _FUNCTIONS


cdef class _Context:
    cdef MadeUpDriver driver
    cdef int device_index


_drivers = []  # of this process: events and streams are addresses to whoever calls


cdef _Context _current():
    return <_Context>contexts[depth - 1] if depth else None


cdef int _push(void* context) noexcept nogil:
    global depth
    if depth == _DEEPEST:
        return INVALID_CONTEXT
    contexts[depth] = context
    depth += 1
    return 0


cdef int _pop(void** context) noexcept nogil:
    global depth
    if not depth:
        return INVALID_CONTEXT
    depth -= 1
    context[0] = contexts[depth]
    return 0


def context_depth():
    """How many contexts this thread has entered and not left."""
    return depth


cdef int _called(str name, int device_index) except -1:
    """Counts a call; returns its code so far. A stream or event of another device than the current context's is refused."""
    cdef _Context context = _current()
    if context is None:
        return INVALID_CONTEXT
    if device_index >= 0 and context.device_index != device_index:
        return INVALID
    return MADE_TO_FAIL if context.driver.has_failed(name, context.device_index) else 0


cdef Stream _stream(void* stream):
    """Stream 0 is the default one of the current context, of which there is none here."""
    return <Stream>stream


cdef int _copy(unsigned long long target, const void* source, size_t nbytes, void* on) noexcept with gil:
    cdef Stream stream = _stream(on)
    cdef MadeUpDriver driver = stream.driver
    cdef _Copy copy = _Copy.__new__(_Copy)
    cdef int code, pinned
    if driver.before_copies is not None:
        driver.before_copies()
    code = _called("cuMemcpyHtoDAsync_v2", stream.device_index)
    if code:
        return code
    copy.target, copy.source, copy.nbytes = target, <uintptr_t>source, nbytes
    pinned = driver.is_pinned(copy.source, nbytes)
    if pinned == 2:
        return INVALID
    driver.copied.append((copy.source, copy.nbytes))
    driver.copy_threads.add(threading.get_ident())
    if not pinned:
        copy.read = PyBytes_FromStringAndSize(<const char*>source, nbytes)
        copy.source = <uintptr_t>PyBytes_AS_STRING(copy.read)
    if not driver.forgets_copies:
        driver.queue_work(stream, copy)
    return 0


cdef int _event_create(void** event, unsigned int flags) noexcept with gil:
    cdef Event created
    cdef int code = _called("cuEventCreate", -1)
    if code:
        return code
    if flags not in (3, 6):  # without timing; for sleeping, or for other processes
        return INVALID
    created = _current().driver.create_event(_current().device_index)
    event[0] = <void*>created
    return 0


cdef int _event_record(void* event, void* on) noexcept with gil:
    cdef Stream stream = _stream(on)
    cdef int code = _called("cuEventRecord", stream.device_index)
    if code:
        return code
    stream.driver.record_event(stream, <Event>event)
    return 0


cdef int _event_synchronize(void* waited) noexcept nogil:
    cdef bint sleeps = False
    with gil:
        if not _is_over(waited):
            (<Event>waited).driver.awaited.add(<Event>waited)
            sleeps = True
    if sleeps:
        pthread_mutex_lock(&_mutex)
        while not _is_over(waited):
            pthread_cond_wait(&_reached, &_mutex)
        pthread_mutex_unlock(&_mutex)
    with gil:
        if sleeps:
            (<Event>waited).driver.awaited.discard(<Event>waited)
        return _called("cuEventSynchronize", (<Event>waited).device_index)


cdef bint _is_over(void* event) noexcept nogil:
    return (<Event>event).came == (<Event>event).recorded


cdef int _stream_wait(void* on, void* event, unsigned int flags) noexcept with gil:
    cdef Stream stream = _stream(on)
    cdef int code = _called("cuStreamWaitEvent", stream.device_index)
    if code or flags:
        return code or INVALID
    if not _is_over(event):
        stream.driver.queue_work(stream, (<Event>event, (<Event>event).recorded))
    return 0


cdef int _stream_query(void* on) noexcept with gil:
    cdef Stream stream = _stream(on)
    cdef int code = _called("cuStreamQuery", stream.device_index)
    return code or (NOT_READY if stream.queue or stream.held else 0)


cdef int _event_query(void* event) noexcept with gil:
    cdef int code = _called("cuEventQuery", (<Event>event).device_index)
    return code or (0 if _is_over(event) else NOT_READY)


cdef int _export(CUipcEventHandle* handle, void* event) noexcept with gil:
    cdef MadeUpDriver driver = (<Event>event).driver
    cdef int code = _called("cuIpcGetEventHandle", (<Event>event).device_index)
    cdef bytes name
    if code:
        return code
    name = len(driver.exported).to_bytes(64, "little")
    driver.exported[name] = <Event>event
    memcpy(handle, PyBytes_AS_STRING(name), 64)
    return 0


cdef int _open(void** event, CUipcEventHandle handle) noexcept with gil:
    cdef _Context context = _current()
    cdef int code = _called("cuIpcOpenEventHandle", -1)
    cdef bytes name = PyBytes_FromStringAndSize(handle.reserved, 64)
    cdef Event opened
    if code:
        return code
    if name in context.driver.opened or name not in context.driver.exported:  # CUDA opens an event once in a process
        return 201
    context.driver.opened.add(name)
    opened = context.driver.exported[name]
    event[0] = <void*>opened
    return 0


cdef int _error_string(int code, const char** text) noexcept nogil:
    text[0] = NULL
    if code == MADE_TO_FAIL:
        text[0] = b"made to fail"
    return 0


_FUNCTIONS = {
    "cuCtxPushCurrent_v2": <uintptr_t>&_push,
    "cuCtxPopCurrent_v2": <uintptr_t>&_pop,
    "cuMemcpyHtoDAsync_v2": <uintptr_t>&_copy,
    "cuEventCreate": <uintptr_t>&_event_create,
    "cuEventRecord": <uintptr_t>&_event_record,
    "cuEventSynchronize": <uintptr_t>&_event_synchronize,
    "cuStreamWaitEvent": <uintptr_t>&_stream_wait,
    "cuStreamQuery": <uintptr_t>&_stream_query,
    "cuEventQuery": <uintptr_t>&_event_query,
    "cuIpcGetEventHandle": <uintptr_t>&_export,
    "cuIpcOpenEventHandle": <uintptr_t>&_open,
    "cuGetErrorString": <uintptr_t>&_error_string,
}
