/* An engine that waits for what its worker has: shmring/core/fan_out_book.pyx (_want), shmring/core/worker_end.pyx (_acknowledge)
 * and shmring/ring/workers.py (hear).
 *
 * A worker leaves messages on two threads, in any order, and may keep some for ever. Leaving one stores its stamp, fences, and looks
 * at what the engine wants: the number of a message; whoever leaves that one or a later one clears it, and rings. In the engine, two
 * wait at a time, each for one message: a caller who sends, who may come at any time, and the frontends whose slots a message keeps.
 * Each stores the smaller of what is wanted already and its own, fences, and looks at all stamps again. A bell wakes both, and who
 * still waits asks anew.
 *
 * What is checked, over every interleaving: when nothing can happen any more, nobody in the engine waits for a message that was left.
 * Acknowledged twice or out of order, a message is seen once.
 *
 * Memory is as in message_ring.pml: a store buffer for the engine and each thread, which leaves in order (x86), or with -DARM in any
 * order that release stores and fences allow. tests/core/test_protocols.py holds its steps against those of the sources.
 * Mutants (-DNO_...) each leave one step out; spin must find a fault in every one of them.
 */

#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef CALLER
#define CALLER 2 /* the message that a caller waits for */
#endif
#ifndef SLOTS
#define SLOTS 1 /* the message that keeps slots of frontends */
#endif

#define WANT 0
#define STAMP(message) (message) /* from 1 on */
#define PLACES (MESSAGES + 1)

#define ENGINE 2 /* 0 and 1 are the threads of the worker */
#define DEPTH 3

typedef StoreBuffer { byte place[DEPTH]; byte value[DEPTH]; bool release[DEPTH]; byte count };

byte memory[PLACES];
StoreBuffer buffer[3];
chan bells = [1] of { bit }; /* one that does not fit is not needed */
bool is_left[PLACES];
bool is_seen[PLACES];
bool caller_waits = false;
bool slots_wait = true;

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

proctype Thread(byte end) {
    byte message = 1, wanted = 0, n = 0;
    do
    :: true ->
        message = 1;
        do :: message < MESSAGES -> message++ :: break od;
end_left:
        atomic { !is_left[message] -> is_left[message] = true }; /* the last view has died; of one that was left, it has before */
        /* begin: _acknowledge */
        store(end, STAMP(message), 1, true);
#ifndef NO_FENCE_BEFORE_BELL
        fence(end);
#endif
        load(end, WANT, wanted);
        if
#ifdef NO_BELL_FOR_A_LATER_MESSAGE
        :: wanted == message ->
#else
        :: wanted != 0 && message >= wanted ->
#endif
#ifdef NO_EXCHANGE
            store(end, WANT, 0, true);
#else
            exchange(end, WANT, 0, wanted);
#endif
            if :: wanted != 0 -> ring(bells) :: else fi
            /* end: _acknowledge */
        :: else
        fi;
        wanted = 0
    :: break /* it keeps the rest */
    od
}

inline look() {
    message = 1;
    do
    :: message <= MESSAGES ->
        load(ENGINE, STAMP(message), flag);
        if
        :: flag && !is_seen[message] -> is_seen[message] = true; came = true
        :: else
        fi;
        message++
    :: else -> break
    od;
    message = 0; flag = 0;
    caller_waits = caller_waits && !is_seen[CALLER];
    slots_wait = slots_wait && !is_seen[SLOTS]
}

/* Somebody waits for a message, and looks again; `came` says whether something has come back meanwhile. */
inline _want(number) {
    load(ENGINE, WANT, earlier);
#ifdef NO_REGARD_FOR_WHO_WAITS
    store(ENGINE, WANT, number, true);
#else
    if :: earlier == 0 || earlier > number -> earlier = number :: else fi;
    store(ENGINE, WANT, earlier, true);
#endif
#ifndef NO_FENCE_BEFORE_LOOKING
    fence(ENGINE);
#endif
    earlier = 0;
    came = false;
#ifndef NO_SECOND_LOOK
    look()
#endif
}

proctype Engine() {
    byte message = 0, flag = 0, earlier = 0, n = 0;
    bool came = false, has_come = false;
awake:
    skip;
    look();
    do
    :: caller_waits -> _want(CALLER); if :: came :: else -> break fi
    :: else -> break
    od;
    do
#ifdef NO_ASKING_ANEW
    :: slots_wait && !has_come -> _want(SLOTS); if :: came :: else -> break fi
#else
    :: slots_wait -> _want(SLOTS); if :: came :: else -> break fi
#endif
    :: else -> break
    od;
    has_come = true;
end_asleep:
    do
    :: bells?_ -> fence(ENGINE); goto awake /* a system call */
    :: !caller_waits && !is_seen[CALLER] -> /* somebody comes who waits, and others sleep on */
        caller_waits = true;
        look();
        do
        :: caller_waits -> _want(CALLER); if :: came :: else -> break fi
        :: else -> break
        od
    od
}

/* A lost wake-up: nothing happens any more, and somebody waits for what was left. */
proctype Judge() {
end_before:
    timeout ->
    assert(!(caller_waits && is_left[CALLER]));
    assert(!(slots_wait && is_left[SLOTS]))
}

init {
    atomic { run Memory(0); run Memory(1); run Memory(ENGINE); run Thread(0); run Thread(1); run Engine(); run Judge() }
}
