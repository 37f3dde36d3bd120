/* The message ring of shmring/core/message_ring.pyx: one writer, one reader, a few records, and a socket for bells.
 *
 * What is checked, over every interleaving: no record is read before it is whole, none is lost, repeated or out of order, and
 * nobody sleeps for ever: a lost wake-up is a state in which both ends wait, which spin reports as an invalid end state.
 *
 * Memory: each end has a store buffer, from which a process of its own moves stores into memory at any later time. On x86 they
 * leave in order (TSO). With -DARM they leave in any order, but that two stores to one place keep theirs, and that a release
 * store leaves after everything before it. A full fence waits until the buffer is empty; so does an exchange, and a system call.
 * Loads are made in the order of the program: each one whose place in it matters is an acquire load or stands behind a fence.
 * What such a load forbids is checked by the mutants that leave it out.
 *
 * Sizes: UNITS of 8 bytes in the ring, RECORDS of one to LONGEST units. A record's first unit says its length; a unit says
 * which record it is of. Steps that stand in one function of the sources are an inline of its name, or between "begin" and "end":
 * tests/core/test_protocols.py holds the two against each other. Mutants (-DNO_...) each leave one step out; spin must find a
 * fault in every one of them.
 */

#ifndef UNITS
#define UNITS 4
#endif
#ifndef LONGEST
#define LONGEST 2
#endif
#ifndef RECORDS
#define RECORDS 4
#endif

#define TAIL 0
#define HEAD 1
#define READER_SLEEPS 2
#define WRITER_WAITS 3
#define DATA 4
#define PLACES (DATA + UNITS)

#define SKIP 255
#define FIRST_UNIT(record, length) (4 * (record + 1) + length)
#define NEXT_UNIT(record) (4 * (record + 1))

#define WRITER 0
#define READER 1
#define DEPTH 6 /* stores that wait: more than an end makes between two fences would only wait for each other */

typedef StoreBuffer { byte place[DEPTH]; byte value[DEPTH]; bool release[DEPTH]; byte count };

byte memory[PLACES];
StoreBuffer buffer[2];
chan to_reader = [1] of { bit }; /* bells; one that does not fit is not needed */
chan to_writer = [1] of { bit };
bool closed = false;

inline store(end, where, what, is_release) {
    atomic {
        buffer[end].count < DEPTH ->
        buffer[end].place[buffer[end].count] = where;
        buffer[end].value[buffer[end].count] = what;
        buffer[end].release[buffer[end].count] = is_release;
        buffer[end].count++
    }
}

inline load(end, where, into) { /* an end sees its own stores at once */
    atomic {
        into = memory[where];
        n = 0;
        do
        :: n < buffer[end].count -> if :: buffer[end].place[n] == where -> into = buffer[end].value[n] :: else fi; n++
        :: else -> break
        od;
        n = 0
    }
}

inline fence(end) { buffer[end].count == 0 }

inline exchange(end, where, what, into) { atomic { buffer[end].count == 0 -> into = memory[where]; memory[where] = what } }

inline ring(bell) { atomic { if :: nfull(bell) -> bell!1 :: full(bell) fi } }

inline hear(bell) { do :: bell?_ :: empty(bell) -> break od }

/* Moves the stores of one end into memory. */
proctype Memory(byte end) {
    byte chosen = 0, n = 0;
    bool allowed = true;
end_idle:
    do
    :: atomic {
        buffer[end].count > 0 ->
#ifdef ARM
        do :: chosen + 1 < buffer[end].count -> chosen++ :: break od;
        allowed = !(buffer[end].release[chosen] && chosen > 0);
        do
        :: n < chosen -> if :: buffer[end].place[n] == buffer[end].place[chosen] -> allowed = false :: else fi; n++
        :: else -> break
        od;
#endif
        if
        :: allowed ->
            memory[buffer[end].place[chosen]] = buffer[end].value[chosen];
            buffer[end].count--;
            n = chosen;
            do
            :: n < buffer[end].count ->
                buffer[end].place[n] = buffer[end].place[n + 1];
                buffer[end].value[n] = buffer[end].value[n + 1];
                buffer[end].release[n] = buffer[end].release[n + 1];
                n++
            :: else -> break
            od;
            buffer[end].place[n] = 0; buffer[end].value[n] = 0; buffer[end].release[n] = false
        :: else
        fi;
        chosen = 0; n = 0; allowed = true
    }
    od
}

inline wake_reader() {
#ifndef NO_FENCE_BEFORE_BELL
    fence(WRITER);
#endif
    load(WRITER, READER_SLEEPS, flag);
    if
    :: flag -> exchange(WRITER, READER_SLEEPS, 0, flag); if :: flag -> ring(to_reader) :: else fi
    :: else
    fi;
    flag = 0;
    owed = false
}

proctype Writer() {
    byte record = 0, length = 1, tail = 0, head = 0, needed = 0, to_end = 0, n = 0, flag = 0;
    bool owed = false;
    do
    :: record < RECORDS ->
        if :: length = 1 :: LONGEST > 1 -> length = 2 fi;
        to_end = UNITS - tail % UNITS;
        needed = (length <= to_end -> length : to_end + length);
        do
        :: tail + needed - head <= UNITS -> break
        :: else ->
            load(WRITER, HEAD, head);
            if
            :: tail + needed - head <= UNITS
            :: else ->
#ifndef NO_BELL_BEFORE_WAITING
                if :: owed -> wake_reader() :: else fi;
#endif
                /* begin: wait_for_space */
                store(WRITER, WRITER_WAITS, 1, false);
#ifndef NO_FENCE_BEFORE_WAITING
                fence(WRITER);
#endif
#ifndef NO_SECOND_LOOK_AT_HEAD
                load(WRITER, HEAD, head);
#endif
                if
                :: tail + needed - head <= UNITS -> store(WRITER, WRITER_WAITS, 0, false)
                /* end: wait_for_space */
                :: else -> fence(WRITER); nempty(to_writer); hear(to_writer) /* a system call */
                fi
            fi
        od;
        if
        :: needed > length -> store(WRITER, DATA + tail % UNITS, SKIP, false); tail = tail + to_end
        :: else
        fi;
        store(WRITER, DATA + tail % UNITS, FIRST_UNIT(record, length), false);
        if :: length == 2 -> store(WRITER, DATA + (tail + 1) % UNITS, NEXT_UNIT(record), false) :: else fi;
        tail = tail + length;
        /* begin: commit */
#ifdef NO_RELEASE_OF_TAIL
        store(WRITER, TAIL, tail, false);
#else
        store(WRITER, TAIL, tail, true);
#endif
        /* end: commit */
        owed = true;
        if :: wake_reader() :: true fi; /* now, or with a later record */
        record++
    :: else -> break
    od;
#ifndef NO_BELL_BEFORE_CLOSING
    if :: owed -> wake_reader() :: else fi;
#endif
#ifndef NO_CLOSE
    fence(WRITER); /* a system call */
    closed = true
#endif
}

inline wake_writer() {
#ifndef NO_FENCE_BEFORE_BELL_OF_SPACE
    fence(READER);
#endif
    load(READER, WRITER_WAITS, flag);
    if
    :: flag -> exchange(READER, WRITER_WAITS, 0, flag); if :: flag -> ring(to_writer) :: else fi
    :: else
    fi;
    flag = 0
}

proctype Reader() {
    byte record = 0, length = 0, tail = 0, head = 0, unit = 0, early = 0, n = 0, flag = 0;
    bool ended = false;
    do
    :: true ->
#ifdef NO_ACQUIRE_OF_TAIL
        load(READER, DATA + head % UNITS, early);
#endif
        load(READER, TAIL, tail);
        if
        :: tail == head ->
            if :: ended -> break :: else fi;
            wake_writer();
            /* begin: fall_asleep */
            store(READER, READER_SLEEPS, 1, false);
#ifndef NO_FENCE_BEFORE_SLEEPING
            fence(READER);
#endif
#ifndef NO_SECOND_LOOK_AT_TAIL
            load(READER, TAIL, tail);
#endif
            if
            :: tail != head -> store(READER, READER_SLEEPS, 0, false)
            /* end: fall_asleep */
            :: else -> fence(READER); nempty(to_reader) || closed; ended = closed; hear(to_reader)
            fi
        :: else ->
            assert(tail - head <= UNITS);
            load(READER, DATA + head % UNITS, unit);
            if
            :: unit == SKIP -> head = head + UNITS - head % UNITS; load(READER, DATA + head % UNITS, unit)
            :: else
            fi;
            /* begin: take */
#ifdef NO_ACQUIRE_OF_TAIL
            if :: early != 0 || true -> unit = early :: true fi;
#endif
            length = unit % 4;
            assert(length == 1 || length == 2);
            head = head + length;
#ifdef NO_RELEASE_OF_HEAD
            store(READER, HEAD, head, false);
            load(READER, DATA + (head - length) % UNITS, unit);
#endif
            assert(unit == FIRST_UNIT(record, length));
            if
            :: length == 2 -> load(READER, DATA + (head - 1) % UNITS, unit); assert(unit == NEXT_UNIT(record))
            :: else
            fi;
#ifndef NO_RELEASE_OF_HEAD
            store(READER, HEAD, head, true);
#endif
            /* end: take */
            unit = 0; length = 0; early = 0;
            record++;
            if :: wake_writer() :: true fi /* after each record, or after some */
        fi
    od;
    assert(record == RECORDS)
}

init {
    atomic { run Memory(WRITER); run Memory(READER); run Writer(); run Reader() }
}
