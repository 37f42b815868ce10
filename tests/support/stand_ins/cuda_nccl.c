/* A stand-in for libcuda and libnccl, in host memory: for the tests of machines without a GPU.
 *
 * With -DSTAND_IN_HIP it is one for libamdhip64 and librccl: HIP's names, a current device of each thread in place of
 * contexts, HIP's versions and priorities. Streams and events belong to the device that was current when they were made.
 *
 * It shows the order of calls, the protocol and the handling of errors. It says nothing about speed, and nothing that it
 * does was compared with a GPU. Streams are threads that work off a queue, with random pauses (STAND_IN_PAUSE_US, seed
 * STAND_IN_SEED); device memory is malloc's. Communicators are segments of POSIX shared memory of one host.
 *
 * As in NCCL, an operation on a communicator of which a rank has died never ends: its asynchronous error is set, and the
 * stream goes on when the communicator is aborted. Sums of 16-bit numbers are rounded after each addition.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

/* ---------------------------------------------------------------------------------------------- failures on request */

static char failing_function[64];
static int failing_result, failing_after;
static atomic_long synchronizations, host_copies;

/* The call number `after` (from 0) of `function` from now on returns `result`. */
void stand_in_fail(const char *function, int after, int result) {
    snprintf(failing_function, sizeof failing_function, "%s", function);
    failing_after = after;
    failing_result = result;
}
/* How many calls have let the host wait for a device, and how many copies have crossed between host and device. */
long stand_in_synchronizations(void) { return synchronizations; }
long stand_in_host_copies(void) { return host_copies; }

static int requested_failure(const char *function) {
    if (strcmp(function, failing_function) || failing_after-- > 0) return 0;
    failing_function[0] = 0;
    return failing_result;
}
#define FAIL_IF_REQUESTED                                  \
    do {                                                   \
        int requested = requested_failure(__func__);       \
        if (requested) return requested;                   \
    } while (0)

/* ------------------------------------------------------------------------------------------------- streams and events */

typedef struct Work {
    void (*run)(void *);
    void *argument;
    struct Work *next;
} Work;

typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Work *first, *last;
    long given, done;
    int ending, device;
} Stream;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    long recorded, reached;
    double at_ms;
    int device;
} Event;

static unsigned pause_us, seed;

static void pause_at_random(void) {
    if (!pause_us) return;
    unsigned mine = __atomic_fetch_add(&seed, 1, __ATOMIC_RELAXED);
    usleep(rand_r(&mine) % (pause_us + 1));
}

static void *work_off(void *argument) {
    Stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first && !stream->ending) pthread_cond_wait(&stream->changed, &stream->lock);
        Work *work = stream->first;
        if (!work) break;
        stream->first = work->next;
        pthread_mutex_unlock(&stream->lock);
        pause_at_random();
        work->run(work->argument);
        free(work->argument);
        free(work);
        pthread_mutex_lock(&stream->lock);
        stream->done++;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static Stream *make_stream(void) {
    Stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_create(&stream->thread, NULL, work_off, stream);
    return stream;
}

/* The default stream, 0, is the host itself: what it is given is done when the call returns, as a framework's work on the
 * host is. So a framework that computes in host memory may stand for one that computes on a GPU. */
static void give(void *handle, void (*run)(void *), const void *argument, size_t bytes) {
    Work *work = calloc(1, sizeof *work);
    work->run = run;
    work->argument = malloc(bytes ? bytes : 1);
    memcpy(work->argument, argument, bytes);
    Stream *stream = handle;
    if (!stream) {
        run(work->argument);
        free(work->argument);
        free(work);
        return;
    }
    pthread_mutex_lock(&stream->lock);
    if (stream->first) stream->last->next = work;
    else stream->first = work;
    stream->last = work;
    stream->given++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

typedef struct {
    Event *event;
    long generation;
} EventWork;

static void reach(void *argument) {
    EventWork *work = argument;
    pthread_mutex_lock(&work->event->lock);
    work->event->at_ms = now_ms();
    work->event->reached = work->generation;
    pthread_cond_broadcast(&work->event->changed);
    pthread_mutex_unlock(&work->event->lock);
}

static void await(void *argument) {
    EventWork *work = argument;
    pthread_mutex_lock(&work->event->lock);
    while (work->event->reached < work->generation) pthread_cond_wait(&work->event->changed, &work->event->lock);
    pthread_mutex_unlock(&work->event->lock);
}

/* ------------------------------------------------------------------------------------------- libcuda, or libamdhip64 */

#ifdef STAND_IN_HIP
#define cuInit hipInit
#define cuDriverGetVersion hipDriverGetVersion
#define cuDeviceGetCount hipGetDeviceCount
#define cuDeviceGetUuid_v2 hipDeviceGetUuid
#define cuCtxGetStreamPriorityRange hipDeviceGetStreamPriorityRange
#define cuStreamCreateWithPriority hipStreamCreateWithPriority
#define cuStreamDestroy_v2 hipStreamDestroy
#define cuStreamSynchronize hipStreamSynchronize
#define cuStreamWaitEvent hipStreamWaitEvent
#define cuEventCreate hipEventCreateWithFlags
#define cuEventDestroy_v2 hipEventDestroy
#define cuEventRecord hipEventRecord
#define cuEventQuery hipEventQuery
#define cuEventSynchronize hipEventSynchronize
#define cuEventElapsedTime hipEventElapsedTime
#define cuThreadExchangeStreamCaptureMode hipThreadExchangeStreamCaptureMode
#define cuMemAlloc_v2 stand_in_allocate
#define cuMemFree_v2 stand_in_free
#define cuMemcpyDtoDAsync_v2 hipMemcpyDtoDAsync
#define cuMemcpyHtoDAsync_v2 hipMemcpyHtoDAsync
#define cuMemcpyDtoHAsync_v2 hipMemcpyDtoHAsync
enum { VERSION = 60342134, GREATEST_PRIORITY = -1, LEAST_PRIORITY = 1, NCCL_VERSION = 22105 };
#else
enum { VERSION = 13000, GREATEST_PRIORITY = -5, LEAST_PRIORITY = 0, NCCL_VERSION = 22907 };
#endif

int cuInit(unsigned flags) {
    FAIL_IF_REQUESTED;
    const char *pause = getenv("STAND_IN_PAUSE_US"), *start = getenv("STAND_IN_SEED");
    pause_us = pause ? atoi(pause) : 0;
    seed = (start ? atoi(start) : 0) + getpid();
    return 0;
}
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int *count) {
    FAIL_IF_REQUESTED;
    const char *gpus = getenv("STAND_IN_GPUS");
    *count = gpus ? atoi(gpus) : 1;
    return 0;
}
/* Every process has GPUs of its own, unless STAND_IN_SHARED_GPU is set. */
static int owner(void) { return getenv("STAND_IN_SHARED_GPU") ? 0 : getpid(); }
#ifdef STAND_IN_HIP
static __thread int current_device;
int hipGetDevice(int *device) { *device = current_device; return 0; }
int hipSetDevice(int device) {
    int count;
    cuDeviceGetCount(&count);
    if (device < 0 || device >= count) return 101;
    current_device = device;
    return 0;
}
/* Letters, as from HIP; with STAND_IN_NO_UUID all GPUs have the same, and differ by their PCI address only. */
int hipDeviceGetUuid(char *uuid, int device) {
    char text[20] = "";
    snprintf(text, sizeof text, getenv("STAND_IN_NO_UUID") ? "XX" : "%08x%08x", owner(), device);
    memcpy(uuid, text, 16);
    return 0;
}
int hipDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "%04x:%02x:00.0", owner() & 0xffff, device);
    return length <= 12;
}
int hipDrvGetErrorString(int result, const char **text) {
    *text = result == 2 ? "out of memory" : result == 600 ? "device not ready" : "a failure that the test asked for";
    return 0;
}
#else
enum { current_device };
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    int mine = owner();
    memset(uuid, 0, 16);
    memcpy(uuid, &mine, sizeof mine);
    uuid[8] = (unsigned char)(device + 1);
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { FAIL_IF_REQUESTED; *context = (void *)(intptr_t)(device + 1); return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxPushCurrent_v2(void *context) { return 0; }
int cuCtxPopCurrent_v2(void **context) { return 0; }
int cuGetErrorString(int result, const char **text) {
    *text = result == 2 ? "out of memory" : result == 600 ? "device not ready" : "a failure that the test asked for";
    return 0;
}
#endif
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = LEAST_PRIORITY; *greatest = GREATEST_PRIORITY; return 0; }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    FAIL_IF_REQUESTED;
    Stream *made = make_stream();
    made->device = current_device;
    *stream = made;
    return 0;
}
int cuStreamDestroy_v2(void *handle) {
    Stream *stream = handle;
    pthread_mutex_lock(&stream->lock);
    stream->ending = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_detach(stream->thread);
    return 0;
}
int cuStreamSynchronize(void *handle) {
    FAIL_IF_REQUESTED;
    synchronizations++;
    Stream *stream = handle;
    if (!stream) return 0;
    pthread_mutex_lock(&stream->lock);
    for (long until = stream->given; stream->done < until;) pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return 0;
}
int cuEventCreate(void **event, unsigned flags) {
    FAIL_IF_REQUESTED;
    Event *made = calloc(1, sizeof *made);
    made->device = current_device;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->changed, NULL);
    *event = made;
    return 0;
}
/* The memory stays: work that refers to it may be waiting in a stream. */
int cuEventDestroy_v2(void *event) { return 0; }
int cuEventRecord(void *handle, void *stream) {
    FAIL_IF_REQUESTED;
    Event *event = handle;
    if (event->device != (stream ? ((Stream *)stream)->device : current_device)) return 400;
    EventWork work = {event, ++event->recorded};
    give(stream, reach, &work, sizeof work);
    return 0;
}
int cuStreamWaitEvent(void *stream, void *handle, unsigned flags) {
    FAIL_IF_REQUESTED;
    Event *event = handle;
    EventWork work = {event, event->recorded};
    give(stream, await, &work, sizeof work);
    return 0;
}
int cuEventQuery(void *handle) {
    FAIL_IF_REQUESTED;
    Event *event = handle;
    pthread_mutex_lock(&event->lock);
    int reached = event->reached >= event->recorded;
    pthread_mutex_unlock(&event->lock);
    return reached ? 0 : 600;
}
int cuEventSynchronize(void *handle) {
    FAIL_IF_REQUESTED;
    synchronizations++;
    Event *event = handle;
    EventWork work = {event, event->recorded};
    await(&work);
    return 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) { return 0; }
int cuEventElapsedTime(float *milliseconds, void *start, void *end) {
    *milliseconds = (float)(((Event *)end)->at_ms - ((Event *)start)->at_ms);
    return 0;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) { FAIL_IF_REQUESTED; *address = (uint64_t)aligned_alloc(512, (bytes + 511) / 512 * 512); return 0; }
int cuMemFree_v2(uint64_t address) { free((void *)address); return 0; }

typedef struct {
    char *target;
    const char *source;
    size_t bytes;
} Copy;
static void copy(void *argument) {
    Copy *one = argument;
    memmove(one->target, one->source, one->bytes);
}
static int enqueue_copy(void *target, const void *source, size_t bytes, void *stream) {
    Copy one = {target, source, bytes};
    give(stream, copy, &one, sizeof one);
    return 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes, void *stream) {
    FAIL_IF_REQUESTED;
    return enqueue_copy((void *)target, (void *)source, bytes, stream);
}
int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t bytes, void *stream) {
    host_copies++;
    return enqueue_copy((void *)target, source, bytes, stream);
}
int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t bytes, void *stream) {
    host_copies++;
    return enqueue_copy(target, (void *)source, bytes, stream);
}
/* -------------------------------------------------------------------------------------------------------- arithmetic */

static const size_t size_of[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

static float widen_half(uint16_t bits) {
    _Float16 value;
    memcpy(&value, &bits, 2);
    return (float)value;
}
static uint16_t narrow_half(float value) {
    _Float16 narrow = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &narrow, 2);
    return bits;
}
static float widen_brain(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}
static uint16_t narrow_brain(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define COMBINE(type)                                                     \
    do {                                                                  \
        type *a = target;                                                 \
        const type *b = source;                                           \
        for (size_t i = 0; i < count; i++)                                \
            a[i] = op == 1   ? a[i] * b[i]                                \
                   : op == 2 ? (a[i] > b[i] ? a[i] : b[i])                \
                   : op == 3 ? (a[i] < b[i] ? a[i] : b[i])                \
                             : a[i] + b[i];                               \
    } while (0)
#define COMBINE_NARROW(widen, narrow)                                     \
    do {                                                                  \
        uint16_t *a = target;                                             \
        const uint16_t *b = source;                                       \
        for (size_t i = 0; i < count; i++) {                              \
            float x = widen(a[i]), y = widen(b[i]);                       \
            a[i] = narrow(op == 1   ? x * y                               \
                          : op == 2 ? (x > y ? x : y)                     \
                          : op == 3 ? (x < y ? x : y)                     \
                                    : x + y);                             \
        }                                                                 \
    } while (0)

static void combine(void *target, const void *source, size_t count, int dtype, int op) {
    switch (dtype) {
    case 0: COMBINE(int8_t); break;
    case 1: COMBINE(uint8_t); break;
    case 2: COMBINE(int32_t); break;
    case 3: COMBINE(uint32_t); break;
    case 4: COMBINE(int64_t); break;
    case 5: COMBINE(uint64_t); break;
    case 6: COMBINE_NARROW(widen_half, narrow_half); break;
    case 7: COMBINE(float); break;
    case 8: COMBINE(double); break;
    case 9: COMBINE_NARROW(widen_brain, narrow_brain); break;
    }
}

#define SCALE(type)                                                       \
    do {                                                                  \
        type *a = target;                                                 \
        for (size_t i = 0; i < count; i++) a[i] = (type)(a[i] * factor);  \
    } while (0)
static void scale(void *target, size_t count, int dtype, double factor) {
    uint16_t *bits = target;
    switch (dtype) {
    case 6: for (size_t i = 0; i < count; i++) bits[i] = narrow_half(widen_half(bits[i]) * (float)factor); break;
    case 7: SCALE(float); break;
    case 8: SCALE(double); break;
    case 9: for (size_t i = 0; i < count; i++) bits[i] = narrow_brain(widen_brain(bits[i]) * (float)factor); break;
    }
}

/* ----------------------------------------------------------------------------------------------------- communicators */

enum { MOST_RANKS = 16, SLOT = 1 << 18, RING = 1 << 16 };

typedef struct {
    atomic_long written, read;
    char bytes[RING];
} Ring;

typedef struct {
    atomic_int arrived;
    atomic_int pids[MOST_RANKS];
    atomic_long steps[MOST_RANKS];
    char slots[MOST_RANKS][SLOT];
    Ring rings[MOST_RANKS][MOST_RANKS]; /* from, to */
} Shared;

typedef struct {
    char name[80];
    int rank, size;
    Shared *shared;
    long step;
    atomic_int aborted, connected, error;
    atomic_long pending;
    int finalized;
} Comm;

static const char *last_error = "";

static int is_dead(int pid) {
    if (!pid) return 0;
    char path[40], line[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 1;
    char *read = fgets(line, sizeof line, file);
    fclose(file);
    char *state = read ? strrchr(line, ')') : NULL;
    return !state || state[2] == 'Z' || state[2] == 'X';
}

/* Called while waiting for other ranks; returns 0 when the communicator has been aborted. */
static int go_on_waiting(Comm *comm, long *turns) {
    if (comm->aborted) return 0;
    if (++*turns % 200 == 0)
        for (int i = 0; i < comm->size && !comm->error; i++)
            if (is_dead(comm->shared->pids[i])) {
                last_error = "the connection was closed by a remote rank";
                comm->error = 6;
            }
    usleep(*turns < 100 ? 0 : 50);
    return 1;
}

static int barrier(Comm *comm) {
    long step = ++comm->step, turns = 0;
    comm->shared->steps[comm->rank] = step;
    for (int i = 0; i < comm->size; i++)
        while (comm->shared->steps[i] < step)
            if (!go_on_waiting(comm, &turns)) return 0;
    return 1;
}

typedef enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECEIVE } Kind;

typedef struct {
    Kind kind;
    const char *source;
    char *target;
    size_t count;
    int dtype, op, peer;
    Comm *comm;
} Call;

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Operations of ncclRedOpCreatePreMulSum, from number 8 on: the factors, which are never forgotten. */
enum { FIRST_SCALED = 8, MOST_SCALED = 256 };
static double factors[MOST_SCALED];
static atomic_int scaled_sums;

static void put_scaled(Call *call, char *slot, const char *source, size_t count) {
    memcpy(slot, source, count * size_of[call->dtype]);
    if (call->op >= FIRST_SCALED) scale(slot, count, call->dtype, factors[call->op - FIRST_SCALED]);
    if (call->op == 4) scale(slot, count, call->dtype, 1.0 / call->comm->size); /* as NCCL: before the sum, in its dtype */
}

static void collect(Call *call) {
    Comm *comm = call->comm;
    size_t width = size_of[call->dtype], parts = call->kind == REDUCE_SCATTER ? comm->size : 1;
    size_t most = SLOT / width / parts;
    for (size_t first = 0; first < call->count; first += most) {
        size_t count = least(most, call->count - first), bytes = count * width;
        char *own = comm->shared->slots[comm->rank], *target = call->target + first * width;
        if (call->kind == REDUCE_SCATTER)
            for (int i = 0; i < comm->size; i++)
                put_scaled(call, own + i * bytes, call->source + (i * call->count + first) * width, count);
        else if (call->kind != BROADCAST || comm->rank == call->peer)
            put_scaled(call, own, call->source + first * width, count);
        if (!barrier(comm)) return;
        for (int i = 0; i < comm->size; i++) {
            char *slot = comm->shared->slots[i];
            if (call->kind == REDUCE_SCATTER) slot += comm->rank * bytes;
            if (call->kind == ALL_GATHER) memcpy(call->target + (i * call->count + first) * width, slot, bytes);
            else if (call->kind == BROADCAST) {
                if (i == call->peer) memcpy(target, slot, bytes);
            } else if (call->kind == REDUCE && comm->rank != call->peer) continue;
            else if (i == 0) memcpy(target, slot, bytes);
            else combine(target, slot, count, call->dtype, call->op);
        }
        if (!barrier(comm)) return;
    }
}

/* As much of a message as there is room or bytes for; returns how many bytes went. */
static size_t exchange(Call *call, size_t done) {
    Comm *comm = call->comm;
    size_t left = call->count * size_of[call->dtype] - done;
    int sends = call->kind == SEND;
    Ring *ring = sends ? &comm->shared->rings[comm->rank][call->peer] : &comm->shared->rings[call->peer][comm->rank];
    size_t at = (sends ? ring->written : ring->read) % RING;
    size_t filled = ring->written - ring->read, there = sends ? RING - filled : filled;
    size_t bytes = least(least(left, there), RING - at);
    if (sends) memcpy(ring->bytes + at, call->source + done, bytes), ring->written += bytes;
    else memcpy(call->target + done, ring->bytes + at, bytes), ring->read += bytes;
    return bytes;
}

typedef struct {
    int count;
    Call calls[64];
} Group;

static void run_group(void *argument) {
    Group *group = argument;
    size_t done[64] = {0};
    for (int i = 0; i < group->count; i++)
        if (group->calls[i].kind < SEND && !group->calls[i].comm->aborted) collect(&group->calls[i]);
    long turns = 0;
    for (int busy = 1; busy;) {
        busy = 0;
        int moved = 0;
        for (int i = 0; i < group->count; i++) {
            Call *call = &group->calls[i];
            if (call->kind < SEND || done[i] == call->count * size_of[call->dtype]) continue;
            int waits = 0; /* a message waits for the one before it with the same peer */
            for (int j = 0; j < i; j++)
                waits |= group->calls[j].kind == call->kind && group->calls[j].peer == call->peer &&
                         done[j] < group->calls[j].count * size_of[group->calls[j].dtype];
            if (!waits) {
                size_t bytes = exchange(call, done[i]);
                done[i] += bytes;
                moved |= bytes > 0;
            }
            busy = 1;
        }
        if (busy && !moved && !go_on_waiting(group->calls[0].comm, &turns)) break;
    }
    for (int i = 0; i < group->count; i++) group->calls[i].comm->pending--;
}

static __thread int group_depth;
static __thread Group group;
static __thread void *group_stream;

static int enqueue(Call call, void *stream) {
    if (call.comm->aborted || call.comm->finalized) return 4;
    if (call.comm->error) return call.comm->error;
    if (!call.comm->connected) return 5;
    if (group.count == 64) return 3;
    group.calls[group.count++] = call;
    group_stream = stream;
    call.comm->pending++;
    if (group_depth) return 0;
    give(stream, run_group, &group, sizeof group);
    group.count = 0;
    return 0;
}

int ncclGetVersion(int *version) {
    const char *own = getenv("STAND_IN_NCCL_VERSION");
    *version = own ? atoi(own) : NCCL_VERSION;
    return 0;
}
typedef struct { char internal[128]; } UniqueId;
int ncclGetUniqueId(UniqueId *id) {
    FAIL_IF_REQUESTED;
    static atomic_int number;
    memset(id, 0, sizeof *id);
    snprintf(id->internal + 1, 100, "stand-in-%d-%d-%.0f", getpid(), number++, now_ms()); /* begins with a zero byte */
    return 0;
}

static void *connect_ranks(void *argument) {
    Comm *comm = argument;
    int file = shm_open(comm->name, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared))) {
        comm->error = 2;
        return NULL;
    }
    comm->shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    pause_at_random();
    comm->shared->pids[comm->rank] = getpid();
    comm->shared->arrived++;
    long turns = 0;
    while (comm->shared->arrived < comm->size)
        if (!go_on_waiting(comm, &turns)) {
            shm_unlink(comm->name);
            return NULL;
        }
    shm_unlink(comm->name);
    comm->connected = 1;
    return NULL;
}

static void *make_comm(const char *name, int rank, int size) {
    Comm *comm = calloc(1, sizeof *comm);
    snprintf(comm->name, sizeof comm->name, "/%.70s", name);
    comm->rank = rank;
    comm->size = size;
    pthread_t thread;
    pthread_create(&thread, NULL, connect_ranks, comm);
    pthread_detach(thread);
    return comm;
}

int ncclCommInitRankConfig(void **comm, int size, UniqueId id, int rank, void *config) {
    FAIL_IF_REQUESTED;
    if (size > MOST_RANKS || rank < 0 || rank >= size) return 4;
    *comm = make_comm(id.internal + 1, rank, size);
    return 7;
}
int ncclCommGetAsyncError(void *handle, int *state) {
    FAIL_IF_REQUESTED;
    Comm *comm = handle;
    *state = comm->error        ? comm->error
             : !comm->connected ? 7
             : comm->finalized && comm->pending ? 7
                                                : 0;
    return 0;
}
int ncclCommFinalize(void *comm) { FAIL_IF_REQUESTED; ((Comm *)comm)->finalized = 1; return 7; }
/* Their memory stays: a stream may be on its way out of it. */
int ncclCommDestroy(void *comm) { FAIL_IF_REQUESTED; return 0; }
int ncclCommAbort(void *comm) { ((Comm *)comm)->aborted = 1; return 0; }
int ncclGroupStart(void) { FAIL_IF_REQUESTED; group_depth++; return 0; }
int ncclGroupEnd(void) {
    FAIL_IF_REQUESTED;
    if (--group_depth == 0 && group.count) {
        give(group_stream, run_group, &group, sizeof group);
        group.count = 0;
    }
    return 0;
}
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int dtype, int residence, void *comm) {
    FAIL_IF_REQUESTED;
    uint16_t bits;
    float number;
    memcpy(&bits, scalar, 2);
    memcpy(&number, scalar, 4);
    int index = scaled_sums++;
    if (dtype < 6 || residence != 1 || index == MOST_SCALED) return 4;
    if (dtype == 8) memcpy(&factors[index], scalar, 8);
    else factors[index] = dtype == 6 ? widen_half(bits) : dtype == 9 ? widen_brain(bits) : number;
    *op = FIRST_SCALED + index;
    return 0;
}
int ncclRedOpDestroy(int op, void *comm) { return 0; }
int ncclAllReduce(const void *source, void *target, size_t count, int dtype, int op, void *comm, void *stream) {
    FAIL_IF_REQUESTED;
    return enqueue((Call){ALL_REDUCE, source, target, count, dtype, op, 0, comm}, stream);
}
int ncclReduceScatter(const void *source, void *target, size_t count, int dtype, int op, void *comm, void *stream) {
    FAIL_IF_REQUESTED;
    return enqueue((Call){REDUCE_SCATTER, source, target, count, dtype, op, 0, comm}, stream);
}
int ncclReduce(const void *source, void *target, size_t count, int dtype, int op, int root, void *comm, void *stream) {
    FAIL_IF_REQUESTED;
    return enqueue((Call){REDUCE, source, target, count, dtype, op, root, comm}, stream);
}
int ncclAllGather(const void *source, void *target, size_t count, int dtype, void *comm, void *stream) {
    FAIL_IF_REQUESTED;
    return enqueue((Call){ALL_GATHER, source, target, count, dtype, 0, 0, comm}, stream);
}
int ncclBroadcast(const void *source, void *target, size_t count, int dtype, int root, void *comm, void *stream) {
    FAIL_IF_REQUESTED;
    return enqueue((Call){BROADCAST, source, target, count, dtype, 0, root, comm}, stream);
}
int ncclSend(const void *source, size_t count, int dtype, int peer, void *comm, void *stream) {
    FAIL_IF_REQUESTED;
    return enqueue((Call){SEND, source, NULL, count, dtype, 0, peer, comm}, stream);
}
int ncclRecv(void *target, size_t count, int dtype, int peer, void *comm, void *stream) {
    FAIL_IF_REQUESTED;
    return enqueue((Call){RECEIVE, NULL, target, count, dtype, 0, peer, comm}, stream);
}
const char *ncclGetErrorString(int result) {
    static const char *texts[] = {"no error",         "unhandled cuda error", "unhandled system error", "internal error",
                                  "invalid argument", "invalid usage",        "remote process exited or there was a network error",
                                  "in progress",      "timeout"};
    return result >= 0 && result < 9 ? texts[result] : "unknown result code";
}
const char *ncclGetLastError(void *comm) { return last_error; }
