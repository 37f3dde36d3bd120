"""Views of memory that is lent, and knowing when the last of them has died.

Theory of operation. A *region* is a piece of memory that views may show: a slot's content, or a copy of what came in a message. Its
references are counted in C: one is its owner's, and each view has one. A torch view is a DLPack tensor whose deleter drops its
reference; a numpy view is built on a buffer (:class:`RegionBytes`) whose end does. Slices, reshapes and whatever else is derived
from a view keep the view's storage or base, and so its reference.

An owner *leaves* its region when no further views of it will be made. If no view lives, the region is free. Otherwise it
*drains*: the thread that drops its last reference pushes it on a stack and rings a bell, an eventfd that the owner's loop
reads. The owner then collects it from the stack, by its key. A view may die anywhere: on any thread, with the interpreter's
lock or without it, while the interpreter ends. So no Python code runs there, and nothing waits.

The stack is pushed to by compare-exchange and taken whole by an exchange, so it has no ABA problem: if the same address is the
top again, it is the right top. A push on an empty stack rings the bell. A push on a stack that is not empty does not, because
an earlier push has rung. The owner clears the bell before it takes the stack, so a push that it does not see rings again.

The memory that a dying view touches outlives the view: a region holds its mapping and the stack. An owner that ends closes the
stack, and regions that are pushed afterwards free themselves. A forked child has copies of all this, and rings no bell.

Invariants: a region is freed once, when its last reference is dropped or when it is collected; a key is collected once; only
the owner's thread, with the interpreter's lock, opens, leaves and collects.

Source: the stack is R. K. Treiber's (IBM RJ 5118, 1986).
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_SetFromErrno
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy
from posix.unistd cimport close, read, write

cdef enum:
    MAX_VIEW_DIMENSIONS = 64  # of numpy and of torch


cdef struct Departures:
    # The stack of regions whose last view has died, and its bell. Lives until its owner and the last region have gone.
    int32_t references
    int forks           # of the process that made it: a forked child does not ring
    int bell            # an eventfd
    void* top           # the top of the stack; CLOSED when its owner no longer collects
    Lent* draining      # regions that were left while viewed and were not collected; the owner's thread only
    uint64_t count      # of them


cdef struct Owner:
    # Something that regions keep, and that is called when the last of them has gone. The first member of its structure, so
    # that `gone` can find the rest.
    int32_t references
    void (*gone)(Owner*) noexcept nogil   # frees it; on any thread, with the interpreter's lock or without


cdef struct Lent:
    # A region: memory that views may show. Its owner has one reference, and each view one.
    int32_t references
    bint is_told             # whether its owner wants to know that the last view has died
    char* address
    uint64_t nbytes
    uint64_t key_high, key_low
    Departures* departures   # NULL: its end is never reported
    Mapped* mapped           # kept as long as the region; NULL: the region has its own memory, or its owner keeps it
    Owner* owner               # something else that is kept as long; NULL: nothing
    DLDevice device          # where it is
    Lent* next               # on the stack
    Lent* before             # in the list of draining ones
    Lent* after


cdef enum:
    CACHE_LINE = 64

cdef char _closed
cdef void* CLOSED = &_closed


# -- regions, in C ---------------------------------------------------------------------------------------------------------


cdef void _drop_departures(Departures* departures) noexcept nogil:
    if not drop_reference(&departures.references):
        close(departures.bell)
        free(departures)


cdef void drop_owner(Owner* owner) noexcept nogil:
    """Drops one reference."""
    if not drop_reference(&owner.references):
        owner.gone(owner)


cdef void _free(Lent* region) noexcept nogil:
    if region.owner != NULL:
        drop_owner(region.owner)
    if region.mapped != NULL:
        drop_mapped(region.mapped)
    free(region)


cdef bint _push(Departures* departures, Lent* region) noexcept nogil:
    """Pushes a region on the stack; returns False if its owner no longer collects. Afterwards the region may be gone."""
    cdef void* seen = load_top(&departures.top)
    cdef uint64_t ring = 1
    while True:
        if seen == CLOSED:
            return False
        region.next = <Lent*>seen
        if push_top(&departures.top, &seen, region):
            break
    if seen == NULL and departures.forks == forks():
        write(departures.bell, &ring, sizeof(ring))
    return True


cdef void hold_region(Lent* region) noexcept nogil:
    """Takes one more reference, which counts as a view."""
    take_reference(&region.references)


cdef void drop_region(Lent* region) noexcept nogil:
    """Drops one reference to a region: of a view, or of an owner that does not want to know of its end."""
    cdef Departures* departures
    if drop_reference(&region.references):
        return
    departures = region.departures
    if not region.is_told or not _push(departures, region):
        _free(region)
    if departures != NULL:
        _drop_departures(departures)  # the region's own reference: kept until here, since the bell was needed after the push


cdef bint is_region_viewed(const Lent* region) noexcept nogil:
    """Whether there is a reference besides the owner's."""
    return count_references(&region.references) > 1


cdef bint leave_region(Lent* region) noexcept:
    """Drops the owner's reference; returns whether the region drains, to be collected when its last view has died."""
    cdef Departures* departures = region.departures
    if not is_region_viewed(region):  # and no further view can be made
        drop_region(region)
        return False
    if departures == NULL or load_top(&departures.top) == CLOSED:
        drop_region(region)
        return True
    region.before, region.after = NULL, departures.draining
    if region.after != NULL:
        region.after.before = region
    departures.draining = region
    departures.count += 1
    region.is_told = True
    if drop_reference(&region.references):
        return True
    _unlink(departures, region)  # the last view has died just now, and saw our reference
    _free(region)
    _drop_departures(departures)
    return False


cdef void _unlink(Departures* departures, Lent* region) noexcept:
    if region.before != NULL:
        region.before.after = region.after
    else:
        departures.draining = region.after
    if region.after != NULL:
        region.after.before = region.before
    departures.count -= 1


cdef Lent* _new_region(char* address, uint64_t nbytes, uint64_t room) except NULL:
    cdef Lent* region = <Lent*>malloc(sizeof(Lent) + room)
    if region == NULL:
        raise MemoryError
    region.references = 1
    region.is_told = False
    region.address = address
    region.nbytes = nbytes
    region.key_high = region.key_low = 0
    region.departures = NULL
    region.mapped = NULL
    region.owner = NULL
    region.device.device_type, region.device.device_id = ON_CPU, 0
    region.next = region.before = region.after = NULL
    return region


cdef Lent* keeping_region(Mapped* mapped, uint64_t offset, uint64_t nbytes, Owner* owner) except NULL:
    """Returns a region that keeps an object, which is called when the region has no view any more.

    Raises:
        ValueError: it exceeds the mapping.
    """
    cdef Lent* region
    region = _new_region(place_in(mapped, offset, nbytes), nbytes, 0)
    keep_mapped(mapped)
    region.mapped = mapped
    take_reference(&owner.references)
    region.owner = owner
    return region


# -- regions, in Python ------------------------------------------------------------------------------------------------------


@cython.final
@cython.no_gc
cdef class Regions:
    """The regions of one owner. It collects here the regions that were left and are no longer viewed.

    Attributes:
        bell: a descriptor that is readable when :meth:`collect` has something to return. Valid until :meth:`close`.

    Raises:
        OSError: this process can't have another descriptor.
    """

    cdef Departures* _departures  # NULL: closed

    def __cinit__(self) -> None:
        cdef int bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        if bell < 0:
            PyErr_SetFromErrno(OSError)
        self._departures = <Departures*>malloc(sizeof(Departures))
        if self._departures == NULL:
            close(bell)
            raise MemoryError
        self._departures.references = 1
        self._departures.forks = forks()
        self._departures.bell = bell
        self._departures.top = NULL
        self._departures.draining = NULL
        self._departures.count = 0

    def __dealloc__(self) -> None:
        self.close()

    def __len__(self) -> int:
        """Returns how many regions drain: left, and not collected."""
        return 0 if self._departures == NULL else self._departures.count

    @property
    def bell(self) -> int:
        return self._open().bell

    cdef Departures* _open(self) except NULL:
        if self._departures == NULL:
            raise ValueError("these regions were closed")
        return self._departures

    def open(self, Mapping mapping not None, offset: int, nbytes: int, key: tuple[int, int]) -> Region:
        """Opens a region, which keeps the mapping.

        Args:
            mapping: the memory it is in.
            offset, nbytes: where, in bytes.
            key: two numbers from 0 to 2**64 - 1, for :meth:`collect`.

        Raises:
            ValueError: it exceeds the mapping, or these are closed.
        """
        key_high, key_low = key
        cdef Region region = Region.__new__(Region)
        region._lent = self.lend(mapping.mapped, offset, nbytes, key_high, key_low)
        return region

    cdef Lent* lend_for(self, uint64_t key_high, uint64_t key_low, char* address, uint64_t nbytes, Owner* owner) except NULL:
        """A region of memory that its owner keeps. ``owner`` is called when the region has gone, unless it is NULL."""
        cdef Departures* departures = self._open()
        cdef Lent* region = _new_region(address, nbytes, 0)
        region.key_high, region.key_low = key_high, key_low
        if owner != NULL:
            take_reference(&owner.references)
            region.owner = owner
        take_reference(&departures.references)
        region.departures = departures
        return region

    cdef Lent* lend(self, Mapped* mapped, uint64_t offset, uint64_t nbytes, uint64_t key_high, uint64_t key_low) except NULL:
        cdef Lent* region = self.lend_for(key_high, key_low, place_in(mapped, offset, nbytes), nbytes, NULL)
        keep_mapped(mapped)
        region.mapped = mapped
        return region

    def collect(self) -> list[tuple[int, int]]:
        """Returns the keys of regions whose last view has died after they were left, in that order, each once."""
        cdef uint64_t rings
        cdef Lent* region = NULL
        cdef Lent* newer
        cdef Lent* top
        keys = []
        if self._departures == NULL:
            return keys
        if self._departures.forks == forks():  # otherwise the bell is the parent's
            read(self._departures.bell, &rings, sizeof(rings))  # before the stack is taken: a later push rings again
        top = <Lent*>take_stack(&self._departures.top, NULL)
        while top != NULL:  # reversed: the first that was pushed comes first
            newer, top = top, top.next
            newer.next, region = region, newer
        while region != NULL:
            top, region = region, region.next
            _unlink(self._departures, top)
            key = (top.key_high, top.key_low)
            _free(top)
            keys.append(key)
        return keys

    def living(self) -> list[tuple[int, int]]:
        """Returns the keys of regions that were left and are still viewed."""
        cdef Lent* region = NULL if self._departures == NULL else self._departures.draining
        keys = []
        while region != NULL:
            if count_references(&region.references):
                keys.append((region.key_high, region.key_low))
            region = region.after
        return keys

    def close(self) -> None:
        """The owner no longer collects: regions free themselves from now on. A second call does nothing."""
        cdef Departures* departures = self._departures
        cdef Lent* region
        cdef Lent* top
        if departures == NULL:
            return
        self._departures = NULL
        top = <Lent*>take_stack(&departures.top, CLOSED)
        while top != NULL:
            region, top = top, top.next
            _free(region)
        _drop_departures(departures)


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Region:
    """Memory that views may show, in its owner's hands. Made by :meth:`Regions.open`, :func:`copied` and :func:`borrowed`.

    Dropping it is :meth:`abandon`.
    """

    cdef Lent* _lent  # NULL: left

    def __dealloc__(self) -> None:
        if self._lent != NULL:
            drop_region(self._lent)

    cdef Lent* lent(self) except NULL:
        if self._lent == NULL:
            raise ValueError("this region was left")
        return self._lent

    @property
    def address(self) -> int:
        """Where it is in this process."""
        return <uintptr_t>self.lent().address

    @property
    def nbytes(self) -> int:
        """Size."""
        return self.lent().nbytes

    @property
    def is_viewed(self) -> bool:
        """Whether a view of it is alive."""
        return is_region_viewed(self.lent())

    def memory(self) -> RegionBytes:
        """Returns its bytes as a buffer that counts as a view, for ``numpy.ndarray`` to be built on."""
        return lend_bytes(self.lent())

    def leave(self) -> bool:
        """Makes no further views; returns whether views are alive, after the last of which :meth:`Regions.collect` has its key."""
        cdef Lent* lent = self.lent()
        self._lent = NULL
        return leave_region(lent)

    def abandon(self) -> None:
        """Makes no further views, and does not want to know when the last one dies. A second call does nothing."""
        cdef Lent* lent = self._lent
        self._lent = NULL
        if lent != NULL:
            drop_region(lent)


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class RegionBytes:
    """A region's bytes as a buffer, which can be written to; a view. Its reference is dropped with the object and not with the
    buffers it gives: ``numpy.ndarray`` gives its buffer back at once, and keeps the object.
    """

    cdef Lent* _lent

    def __dealloc__(self) -> None:
        if self._lent != NULL:
            drop_region(self._lent)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        if self._lent == NULL:
            raise BufferError("this is made by a region's memory()")
        PyBuffer_FillInfo(buffer, self, self._lent.address, <Py_ssize_t>self._lent.nbytes, 0, flags)


cdef Lent* copy_region(const void* data, uint64_t nbytes) except NULL:
    """A region with a copy of these bytes, which starts on a cache line and goes with its last view."""
    cdef Lent* region = _new_region(NULL, nbytes, nbytes + CACHE_LINE - 1)
    region.address = <char*>((<uintptr_t>(region + 1) + CACHE_LINE - 1) & ~<uintptr_t>(CACHE_LINE - 1))
    if nbytes:
        memcpy(region.address, data, nbytes)
    return region


cdef RegionBytes lend_bytes(Lent* region):
    """A region's bytes as a buffer that counts as a view."""
    cdef RegionBytes memory = RegionBytes.__new__(RegionBytes)
    take_reference(&region.references)
    memory._lent = region
    return memory


def copied(data: Buffer) -> Region:
    """Returns a region with a copy of these bytes, which starts on a cache line and goes with its last view."""
    cdef Py_buffer buffer
    cdef Region region = Region.__new__(Region)
    PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
    try:
        region._lent = copy_region(buffer.buf, buffer.len)
    finally:
        PyBuffer_Release(&buffer)
    return region


def borrowed(address: int, nbytes: int) -> Region:
    """Returns a region over memory that the caller keeps for as long as views of it live."""
    cdef Region region = Region.__new__(Region)
    region._lent = _new_region(<char*><uintptr_t>address, nbytes, 0)
    return region


# -- torch -------------------------------------------------------------------------------------------------------------------


cdef union Handed:
    DLManagedTensor plain
    DLManagedTensorVersioned versioned


cdef struct View:
    Handed handed    # the first member: torch gives its address back
    Lent* region
    bint* is_gone    # is set when the view goes, while it is being handed over
    int64_t extents[1]  # its shape, then its strides


cdef void _view_gone(View* view) noexcept nogil:
    """The deleter: on whatever thread, with the interpreter's lock or without."""
    if view.is_gone != NULL:
        view.is_gone[0] = True
    drop_region(view.region)
    free(view)


cdef void _plain_gone(DLManagedTensor* tensor) noexcept nogil:
    _view_gone(<View*>tensor)


cdef void _versioned_gone(DLManagedTensorVersioned* tensor) noexcept nogil:
    _view_gone(<View*>tensor)


@cython.final
cdef class TensorMaker:
    """Makes torch tensors that are views of regions. The core does not know torch: torch's functions are handed in.

    Args:
        from_dlpack: ``torch.from_dlpack``, which takes a capsule.
        exchange_api: ``torch.Tensor.__dlpack_c_exchange_api__`` where torch has it: the same in C, without the capsule. It is not
            used unless it is of DLPack's version 1.
    """

    cdef object _from_dlpack
    cdef object _capsule  # keeps the table
    cdef int (*_to_python)(DLManagedTensorVersioned*, void**) except -1

    def __init__(self, from_dlpack: Callable[[Any], Any], exchange_api=None) -> None:
        cdef DLPackExchangeAPIHeader* header
        self._from_dlpack = from_dlpack
        self._capsule = exchange_api
        self._to_python = NULL
        if exchange_api is not None:
            header = <DLPackExchangeAPIHeader*>PyCapsule_GetPointer(exchange_api, "dlpack_exchange_api")
            while header != NULL and header.version.major != 1:
                header = header.prev_api
            if header != NULL:
                self._to_python = (<DLPackExchangeAPI*>header).managed_tensor_to_py_object

    def tensor(self, Region region not None, offset: int, shape: Sequence[int], code: int, bits: int):
        """Returns a contiguous tensor at ``offset`` in a region.

        Args:
            region: that it is a view of.
            offset: in bytes.
            shape: its extents.
            code, bits: its dtype, as DLPack numbers them; ``bits`` is a multiple of 8.

        Raises:
            ValueError: it exceeds the region, or there is no such shape.
            RuntimeError, BufferError: this torch does not take such a dtype.
        """
        cdef int64_t extents[MAX_VIEW_DIMENSIONS]
        cdef int index, ndim
        if len(shape) > MAX_VIEW_DIMENSIONS:
            raise ValueError(f"a tensor has {len(shape)} dimensions, more than {MAX_VIEW_DIMENSIONS}")
        ndim = len(shape)
        for index in range(ndim):
            extents[index] = shape[index]
        return self.view(region.lent(), offset, ndim, extents, code, bits)

    cdef object view(
        self, Lent* region, uint64_t offset, int ndim, const int64_t* shape, uint8_t code, uint8_t bits
    ):
        cdef View* view
        cdef DLTensor* tensor
        cdef uint64_t nbytes = bits // 8, items = 1
        cdef bint is_gone = False
        cdef void* made = NULL
        cdef int index
        if not nbytes or bits % 8:
            raise ValueError(f"a tensor's items have whole bytes, not {bits} bits")
        view = <View*>malloc(sizeof(View) + 2 * ndim * sizeof(int64_t))
        if view == NULL:
            raise MemoryError
        for index in range(ndim - 1, -1, -1):
            view.extents[index] = shape[index]
            view.extents[ndim + index] = <int64_t>items
            if shape[index] < 0 or multiply_overflows(items, <uint64_t>shape[index], &items):
                free(view)
                raise ValueError("a tensor's extents are negative, or too large")
        if multiply_overflows(items, nbytes, &nbytes):
            free(view)
            raise ValueError("a tensor's extents are too large")
        if offset > region.nbytes or nbytes > region.nbytes - offset:
            free(view)
            raise ValueError(f"a tensor of {nbytes} bytes at {offset} exceeds its region of {region.nbytes}")
        if self._to_python != NULL:
            view.handed.versioned.version.major = 1
            view.handed.versioned.version.minor = 0
            view.handed.versioned.manager_ctx = NULL
            view.handed.versioned.deleter = _versioned_gone
            view.handed.versioned.flags = 0
            tensor = &view.handed.versioned.dl_tensor
        else:
            view.handed.plain.manager_ctx = NULL
            view.handed.plain.deleter = _plain_gone
            tensor = &view.handed.plain.dl_tensor
        tensor.data = region.address + offset
        tensor.device = region.device
        tensor.ndim = ndim
        tensor.dtype.code = code
        tensor.dtype.bits = bits
        tensor.dtype.lanes = 1
        tensor.shape = view.extents
        tensor.strides = view.extents + ndim
        tensor.byte_offset = 0
        view.region = region
        view.is_gone = &is_gone
        take_reference(&region.references)
        try:
            if self._to_python != NULL:
                self._to_python(&view.handed.versioned, &made)
                result = <object>made
                Py_DECREF(result)
            else:
                result = self._from_dlpack(PyCapsule_New(&view.handed.plain, "dltensor", NULL))
        except BaseException:
            if not is_gone:  # whether torch has freed a refused tensor depends on how far it came
                _view_gone(view)
            raise
        if not is_gone:
            view.is_gone = NULL
        return result
