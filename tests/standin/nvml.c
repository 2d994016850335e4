/*
 * A stand-in for libnvidia-ml.so.1, for tests only: it answers pynvml from a text file instead of a driver.
 *
 * STANDIN_STATE names that file. Every call looks whether it was replaced and then reads it anew, so a test
 * changes the GPUs of a running process by renaming a new file over the old one. A value that the file does not give
 * answers NVML_ERROR_NOT_SUPPORTED. STANDIN_LOOK_MILLISECONDS, if set, is the least time between two looks: then
 * nearly all calls answer from memory, in less than a microsecond. STANDIN_CALLS, if set, begins the name of a
 * file for each process, which a dot and its PID ends: the counts of its calls at any time, one Counter each.
 *
 * The state: one "key value" line each, "#" starts a comment line. N is a GPU's index, S a slot of a MIG instance.
 * The TEXT "(unterminated)" fills the caller's buffer, without a NUL.
 *
 *   driver 550.54.15 | nvml 12.550.54.15 | cuda 12040 | count 2
 *   init 9                                       what nvmlInit returns
 *   holds PATH | leaks PATH                      open from the first nvmlInit to the last nvmlShutdown; or for ever
 *   abi535 1                                     _v3 process rows are 32 bytes, as drivers 535.43 to 535.98 had it
 *   gpu.N.uuid|name|pci|vbios TEXT, gpu.N.compute_capability MAJOR MINOR
 *   gpu.N.minor|temperature|power|energy|encoder|decoder|compute_mode|numa_node NUMBER
 *   gpu.N.virtualization_mode NUMBER
 *   gpu.N.power.limit|enforced_limit|default_limit NUMBER, gpu.N.power.limits LEAST MOST
 *   gpu.N.memory.total|used|reserved BYTES       used without reserved, as in the v2 struct
 *   gpu.N.utilization.gpu|memory PERCENT
 *   gpu.N.cc.protected_kib|unprotected_kib NUMBER
 *   gpu.N.mig.mode 0|1, gpu.N.mig.pending 0|1, gpu.N.mig.max 7
 *   gpu.N.processes 1                            the lists are supported; then, as often as wanted:
 *   gpu.N.process compute|graphics|mps PID BYTES GI CI PROTECTED_BYTES       ("-": the driver does not say)
 *   gpu.N.samples 1                              both calls for process utilization are supported, unless a rule
 *                                                "fail" refuses one; then, as often as wanted:
 *   gpu.N.sample PID MICROSECONDS|now SM MEMORY ENCODER DECODER JPEG OFA     (the last two only by the newer call)
 *   gpu.N.garbage ROWS                           samples of any time are told, and so many rows more than are written;
 *                                                the process lists too count so many more than they write
 *   gpu.N.field.ID.SCOPE double|uint|ulong|ulonglong|slonglong|sint|ushort|error VALUE
 *   gpu.N.clock.graphics|sm|memory|video MHZ, gpu.N.clock.events|supported_events BITS
 *   gpu.N.max_clock.graphics|sm|memory|video MHZ
 *   gpu.N.performance_state NUMBER, gpu.N.fabric STATE STATUS
 *   gpu.N.fans NUMBER, gpu.N.fan.I PERCENT       fan 0 is also what the call without a fan's number tells
 *   gpu.N.ecc.TYPE.COUNTER.LOCATION NUMBER       nvml.h's numbers; counter 1 is the aggregate one
 *   gpu.N.gpm METRIC=VALUE …                     nvml.h's number and unit; "error:CODE": that code; others are not
 *                                                supported, or end the call where "strict" is among the words. GPM is
 *                                                supported where a GPU has this line, partitioned or not
 *   gpu.N.mig.S.gi|ci NUMBER                     gi is what makes the instance exist
 *   gpu.N.mig.S.uuid|name|memory.*|processes|process    as for a GPU
 *   gpu.N.mig.S.generation NUMBER                another number makes older handles stale
 *   gpu.N.mig.S.handle NUMBER                    the handle is made of this alone: devices that follow each other
 *                                                under one number have one handle, as a driver that recycles them
 *   gpu.N.mig.S.placement PROFILE START SIZE     of its GPU instance
 *   gpu.N.mig.S.gpm METRIC=VALUE …               of its GPU instance
 *   gpu.N.mig.S.attributes NINE NUMBERS          in the order of nvmlDeviceAttributes_t
 *
 *   gpu.N.events MASK                            the types of events that it tells
 *   xid SERIAL N CODE GI CI                      an event of GPU N, told once in each event set that N was registered in
 *                                                when the line came; serials grow; GI and CI may be "-"
 *   gpm_apart_ms NUMBER                          GPM's samples must be further apart; without the line 100
 *   one_queue 1                                  each event is told once, to whichever set is asked first, as NVIDIA's
 *                                                mock driver does (k8s-test-infra, pkg/gpu/mocknvml/bridge/events.go)
 *
 *   fail FUNCTION TARGET CODE                    returns that nvmlReturn_t
 *   delay FUNCTION TARGET SECONDS                sleeps first ("inf" is allowed); over as soon as the line is gone
 *   crash FUNCTION TARGET                        abort()
 *   then FUNCTION TARGET                         once that call is answered, the file beside the state whose name has
 *                                                ".next" at its end takes the state's place
 *
 * FUNCTION is a name or "*". TARGET is "*" (also the calls that concern no GPU), "N" (a GPU and its instances),
 * "N.gpu" (not its instances), "N.mig" (only its instances) or "N.S". The first line that matches counts. What is asked
 * of an event set is about the GPU that was registered in it first.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef void *Device;

typedef enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    ARGUMENT_VERSION_MISMATCH = 25,
} Return;

#define NOT_AVAILABLE (~0ULL)
#define SAMPLING_PERIOD_MICROSECONDS 167000
#define VERSION(type, number) ((u32)(sizeof(type) | (number) << 24))

/* The structs of nvml.h that cross the border. */
typedef struct { u64 total, free, used; } Memory;
typedef struct { u32 version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { u32 gpu, memory; } Utilization;
typedef struct { u32 version, sensor; int celsius; } Temperature;
typedef struct { u32 version; unsigned char cluster[16]; u32 status, clique; unsigned char state; u32 health; } Fabric;
typedef struct { u32 pid; u64 used; u32 gi, ci; u64 cc_protected; } ProcessRow;
typedef struct { u32 version, mode, count; ProcessRow *rows; } ProcessDetailList;
typedef struct { u32 pid; u64 timestamp; u32 sm, memory, encoder, decoder; } Sample;
typedef struct { u64 timestamp; u32 pid, sm, memory, encoder, decoder, jpeg, ofa; } SampleInfo;
typedef struct { u32 version, count; u64 since; SampleInfo *samples; } SampleInfos;
typedef struct { u64 protected_kib, unprotected_kib; } ConfComputeMemory;
typedef struct { u32 counts[8]; u64 memory_mib; } Attributes;
typedef struct { Device device; u32 id, profile_id, start, size; } GpuInstanceInfo;
typedef struct {
    char legacy_id[16];
    u32 domain, bus, device, device_id, subsystem_id;
    char id[32];
} Pci;
typedef union {
    double d;
    u32 ui;
    unsigned long ul;
    u64 ull;
    long long sll;
    int si;
    unsigned short us;
} Value;
typedef struct {
    u32 id, scope;
    int64_t timestamp, latency;
    u32 type, code;
    Value value;
} Field;
typedef struct { u32 version, supported; } GpmSupport;
typedef struct {
    u32 id, code;
    double value;
    const char *short_name, *long_name, *unit;
} GpmMetric;
enum { MOST_MEASURED = 64 };
typedef struct { /* nvmlGpmSample_st is opaque, and this is ours */
    bool taken, strict;
    uintptr_t of;
    double at;
    u32 count;
    struct { u32 id, code; double value; } measured[MOST_MEASURED];
} GpmSample;
enum { GPM_METRICS = 477 /* NVML_GPM_METRIC_MAX of nvml.h 13 */ };
typedef struct {
    u32 version, count;
    GpmSample *first, *second;
    GpmMetric metrics[GPM_METRICS];
} GpmMetrics;

typedef struct {
    Device device;
    u64 type, data;
    u32 gi, ci;
} EventData;

/* One ProcessRow serves every list: the older structs are its beginnings. */
enum { ROW_V1 = 16, ROW_V2 = 24, ROW_535 = 32 };

_Static_assert(sizeof(Memory) == 24, "nvmlMemory_t");
_Static_assert(sizeof(MemoryV2) == 40, "nvmlMemory_v2_t");
_Static_assert(sizeof(Temperature) == 12, "nvmlTemperature_v1_t");
_Static_assert(sizeof(Fabric) == 36, "nvmlGpuFabricInfo_v2_t");
_Static_assert(sizeof(ProcessRow) == ROW_535, "nvmlProcessDetail_v1_t");
_Static_assert(offsetof(ProcessRow, cc_protected) == ROW_V2, "nvmlProcessInfo_v2_t");
_Static_assert(offsetof(ProcessRow, gi) == ROW_V1, "nvmlProcessInfo_v1_t");
_Static_assert(sizeof(ProcessDetailList) == 24, "nvmlProcessDetailList_v1_t");
_Static_assert(sizeof(Sample) == 32, "nvmlProcessUtilizationSample_t");
_Static_assert(sizeof(SampleInfo) == 40, "nvmlProcessUtilizationInfo_v1_t");
_Static_assert(sizeof(SampleInfos) == 24, "nvmlProcessesUtilizationInfo_v1_t");
_Static_assert(sizeof(Attributes) == 40, "nvmlDeviceAttributes_t");
_Static_assert(sizeof(GpuInstanceInfo) == 24, "nvmlGpuInstanceInfo_t");
_Static_assert(sizeof(Pci) == 68, "nvmlPciInfo_t");
_Static_assert(sizeof(Field) == 40, "nvmlFieldValue_t");
_Static_assert(sizeof(EventData) == 32, "nvmlEventData_t");
_Static_assert(sizeof(GpmSupport) == 8, "nvmlGpmSupport_t");
_Static_assert(sizeof(GpmMetric) == 40, "nvmlGpmMetric_t");
_Static_assert(sizeof(GpmMetrics) == 19104, "nvmlGpmMetricsGet_t");

/* ---- the state file -------------------------------------------------------------------------------------------- */

typedef struct {
    const char *text;
    u64 number;
    bool is_number;
} Word;

typedef struct Line {
    const char *key, *value;
    size_t order;
    const struct Line *next; /* with the same key */
    const Word *words; /* of the value */
    size_t count;
} Line;

typedef struct {
    char function[56];
    u64 count;
} Counter;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards everything below */
static struct {
    int file; /* stays open, so that a new file cannot be given the inode of the one that was read */
    struct stat seen;
    u64 looked;
    char *text, *words_text;
    Line *lines;
    Word *words;
    size_t count;
    u32 generation; /* how often it was read */
    bool has_rules;
} state = {.file = -1};
static u32 initialized;
enum { MOST_SETS = 64, MOST_IN_SET = 16 };
typedef struct {
    bool used;
    u32 waits, count;
    struct { uintptr_t device; u64 told; } gpus[MOST_IN_SET];
} EventSet;
static EventSet sets[MOST_SETS];

/* A mistake in a state file must not look like a driver's answer. */
__attribute__((noreturn, format(printf, 1, 2))) static void give_up(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("NVML stand-in: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

static int by_key(const void *left, const void *right)
{
    const Line *a = left, *b = right;
    int order = strcmp(a->key, b->key);
    return order ? order : (a->order > b->order) - (a->order < b->order);
}

static u64 number(const Word *word)
{
    if (!word->is_number)
        give_up("'%s' is not a number", word->text);
    return word->number;
}

/* Cuts the text of a value into words, and returns where the next line's begin. */
static Word *cut(char *text, Word *words)
{
    char *rest = NULL;
    for (char *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char *end;
        bool none = strcmp(word, "-") == 0;
        u64 value = none ? NOT_AVAILABLE : strtoull(word, &end, 10);
        *words++ = (Word){word, value, none || (end != word && !*end)};
    }
    return words;
}

static const Line *first_line(const char *key);

static void parse(char *text)
{
    size_t lines = 1, words = 1, length = strlen(text);
    for (const char *at = text; *at; at++) {
        lines += *at == '\n';
        words += *at == '\n' || *at == ' ';
    }
    free(state.text);
    free(state.words_text);
    free(state.lines);
    free(state.words);
    state.text = text;
    state.words_text = memcpy(malloc(length + 1), text, length + 1);
    state.lines = calloc(lines, sizeof *state.lines);
    state.words = calloc(words, sizeof *state.words);
    state.count = 0;
    Word *word = state.words;
    char *rest = NULL;
    for (char *at = strtok_r(text, "\n", &rest); at; at = strtok_r(NULL, "\n", &rest)) {
        if (*at == '#')
            continue;
        char *space = strchr(at, ' ');
        if (!space)
            give_up("no value in line '%s'", at);
        *space = '\0';
        char *copy = state.words_text + (space + 1 - text);
        copy[strlen(space + 1)] = '\0';
        Line *line = &state.lines[state.count];
        *line = (Line){.key = at, .value = space + 1, .order = state.count++, .words = word};
        word = cut(copy, word);
        line->count = (size_t)(word - line->words);
    }
    qsort(state.lines, state.count, sizeof *state.lines, by_key);
    for (size_t i = 0; i + 1 < state.count; i++)
        if (strcmp(state.lines[i].key, state.lines[i + 1].key) == 0)
            state.lines[i].next = &state.lines[i + 1];
    state.generation++;
    state.has_rules = first_line("delay") || first_line("crash") || first_line("fail") || first_line("then");
}

static bool may_look(void)
{
    static long long pause = -1;
    struct timespec now;
    if (pause < 0) {
        const char *given = getenv("STANDIN_LOOK_MILLISECONDS");
        pause = given ? atoll(given) : 0;
    }
    if (!pause)
        return true;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    u64 milliseconds = (u64)now.tv_sec * 1000 + (u64)now.tv_nsec / 1000000;
    if (state.looked && milliseconds < state.looked + (u64)pause)
        return false;
    state.looked = milliseconds;
    return true;
}

static void refresh(void)
{
    if (!may_look())
        return;
    const char *path = getenv("STANDIN_STATE");
    struct stat now;
    if (!path || stat(path, &now) != 0)
        return;
    if (state.file >= 0 && now.st_ino == state.seen.st_ino && now.st_dev == state.seen.st_dev &&
        now.st_size == state.seen.st_size && now.st_mtim.tv_sec == state.seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == state.seen.st_mtim.tv_nsec)
        return;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &now) != 0)
        give_up("cannot read %s: %s", path, strerror(errno));
    char *text = calloc((size_t)now.st_size + 1, 1);
    for (off_t length = 0; length < now.st_size;) {
        ssize_t got = read(file, text + length, (size_t)(now.st_size - length));
        if (got <= 0)
            give_up("cannot read %s: %s", path, got ? strerror(errno) : "it became shorter");
        length += got;
    }
    if (state.file >= 0)
        close(state.file);
    state.file = file;
    state.seen = now;
    parse(text);
}

/* The first line with that key; the others are next to it. */
static const Line *first_line(const char *key)
{
    size_t low = 0, high = state.count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (strcmp(state.lines[middle].key, key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low < state.count && strcmp(state.lines[low].key, key) == 0 ? &state.lines[low] : NULL;
}

/* What find() has found in this state, by what it was asked. Its texts are told apart by where they are: each must
 * be a literal or of prefix_of(). */
enum { PARTS = 4, MEMO = 1 << 13 };
static struct {
    const char *format;
    uintptr_t parts[PARTS];
    u32 generation;
    const Line *line;
} memo[MEMO];

__attribute__((format(printf, 1, 2))) static const Line *find(const char *format, ...)
{
    uintptr_t parts[PARTS] = {0}, hash = (uintptr_t)format;
    size_t count = 0;
    va_list arguments;
    va_start(arguments, format);
    for (const char *at = strchr(format, '%'); at; at = strchr(at + 2, '%')) {
        parts[count] = at[1] == 's' ? (uintptr_t)va_arg(arguments, const char *) : va_arg(arguments, u32);
        hash = hash * 31 + parts[count++];
    }
    va_end(arguments);
    size_t place = (hash * 0x9e3779b97f4a7c15u) >> 51;
    if (memo[place].generation == state.generation && memo[place].format == format &&
        memcmp(memo[place].parts, parts, sizeof parts) == 0)
        return memo[place].line;
    char key[128];
    va_start(arguments, format);
    vsnprintf(key, sizeof key, format, arguments);
    va_end(arguments);
    memo[place].format = format;
    memcpy(memo[place].parts, parts, sizeof parts);
    memo[place].generation = state.generation;
    return memo[place].line = first_line(key);
}

static u64 number_in(const Line *line)
{
    if (line->count != 1)
        give_up("'%s' is not a number", line->value);
    return number(line->words);
}

static u64 number_or(const Line *line, u64 otherwise)
{
    return line ? number_in(line) : otherwise;
}

static const Word *words_of(const Line *line, size_t least)
{
    if (line->count < least)
        give_up("'%s %s' has fewer than %zu words", line->key, line->value, least);
    return line->words;
}

/* ---- what each call starts and ends with ----------------------------------------------------------------------- */

enum { NO_GPU = -1, NO_SLOT = -1 };
enum about { THE_LIBRARY, THE_SYSTEM, AN_INDEX, A_DEVICE, A_GPU_INSTANCE, AN_EVENT_SET };

typedef struct {
    const char *function;
    Return code;
    int gpu, slot;
    const char *prefix; /* of the keys that describe the device */
    bool then;
} Call;

enum { MOST_GPUS = 128, MOST_SLOTS = 32 };

static const char *prefix_of(int gpu, int slot)
{
    static char prefixes[MOST_GPUS][1 + MOST_SLOTS][24];
    if (gpu < 0 || gpu >= MOST_GPUS || slot >= MOST_SLOTS)
        give_up("no room for GPU %d, slot %d", gpu, slot);
    char *prefix = prefixes[gpu][1 + slot];
    if (!*prefix && slot == NO_SLOT)
        snprintf(prefix, sizeof prefixes[0][0], "gpu.%d", gpu);
    else if (!*prefix)
        snprintf(prefix, sizeof prefixes[0][0], "gpu.%d.mig.%d", gpu, slot);
    return prefix;
}

static void point_at(Call *call, int gpu, int slot)
{
    call->gpu = gpu;
    call->slot = slot;
    call->prefix = prefix_of(gpu, slot);
}

static u32 gpu_count(void)
{
    return (u32)number_or(first_line("count"), 0);
}

static bool mig_enabled(int gpu)
{
    return number_or(find("gpu.%d.mig.mode", gpu), 0) == 1;
}

static int mig_slots(int gpu)
{
    return mig_enabled(gpu) ? (int)number_or(find("gpu.%d.mig.max", gpu), 7) : 0;
}

static bool mig_exists(int gpu, int slot)
{
    return slot < mig_slots(gpu) && find("gpu.%d.mig.%d.gi", gpu, slot);
}

/* A handle is made of what the device is, not of where it stands: it outlives a change of order, and goes stale. */
static uintptr_t make_handle(const char *prefix, int slot)
{
    char identity[256];
    const Line *uuid = find("%s.uuid", prefix), *own = find("%s.handle", prefix);
    snprintf(identity, sizeof identity, "%s %llu", own ? own->value : uuid ? uuid->value : prefix,
             number_or(find("%s.generation", prefix), 0));
    u32 hash = 2166136261u; /* FNV-1a */
    for (const char *at = identity; *at; at++)
        hash = (hash ^ (unsigned char)*at) * 16777619u;
    return (uintptr_t)0x4e56 << 48 | (uintptr_t)(slot != NO_SLOT) << 32 | hash;
}

static struct {
    u32 generation;
    size_t count;
    struct { uintptr_t handle; int gpu, slot; } list[MOST_GPUS * (1 + MOST_SLOTS)];
} devices;

static void list_devices(void)
{
    if (devices.generation == state.generation)
        return;
    devices.generation = state.generation;
    devices.count = 0;
    for (int gpu = 0; gpu < (int)gpu_count(); gpu++)
        for (int slot = NO_SLOT; slot < mig_slots(gpu); slot++)
            if (slot == NO_SLOT || mig_exists(gpu, slot)) {
                devices.list[devices.count].handle = make_handle(prefix_of(gpu, slot), slot);
                devices.list[devices.count].gpu = gpu;
                devices.list[devices.count++].slot = slot;
            }
}

static uintptr_t handle_of(const Call *call)
{
    list_devices();
    for (size_t i = 0; i < devices.count; i++)
        if (devices.list[i].gpu == call->gpu && devices.list[i].slot == call->slot)
            return devices.list[i].handle;
    return make_handle(call->prefix, call->slot);
}

static bool locate_handle(Call *call, uintptr_t handle)
{
    list_devices();
    for (size_t i = 0; i < devices.count; i++) {
        if (devices.list[i].handle == handle) {
            point_at(call, devices.list[i].gpu, devices.list[i].slot);
            return true;
        }
    }
    return false;
}

/* The first MIG device of a GPU instance. */
static bool locate_gpu_instance(Call *call, int gpu, u32 id)
{
    for (int slot = 0; slot < mig_slots(gpu); slot++) {
        const Line *gi = find("gpu.%d.mig.%d.gi", gpu, slot);
        if (gi && number_in(gi) == id) {
            point_at(call, gpu, slot);
            return true;
        }
    }
    return false;
}

/* nvmlGpuInstance_t: which GPU, and which id on it. */
static uintptr_t handle_of_gpu_instance(int gpu, u32 id)
{
    return (uintptr_t)0x4749 << 48 | (uintptr_t)gpu << 32 | id;
}

static Return locate(Call *call, enum about about, uintptr_t which)
{
    if (about == THE_LIBRARY)
        return state.file < 0 ? DRIVER_NOT_LOADED : SUCCESS;
    if (!initialized)
        return UNINITIALIZED;
    if (about == AN_INDEX) {
        if (which >= gpu_count())
            return INVALID_ARGUMENT;
        point_at(call, (int)which, NO_SLOT);
    }
    if (about == AN_EVENT_SET) {
        const EventSet *set = (const EventSet *)which;
        if (set < sets || set >= sets + MOST_SETS || !set->used)
            return INVALID_ARGUMENT;
        if (set->count && !locate_handle(call, set->gpus[0].device))
            return GPU_IS_LOST;
    }
    if (about == A_DEVICE && !locate_handle(call, which))
        return INVALID_ARGUMENT;
    if (about == A_GPU_INSTANCE &&
        (which >> 48 != 0x4749 || !locate_gpu_instance(call, (int)(which >> 32 & 0xffff), (u32)which)))
        return INVALID_ARGUMENT;
    return SUCCESS;
}

static bool targets(const char *target, const Call *call)
{
    if (strcmp(target, "*") == 0)
        return true;
    char *part;
    long gpu = strtol(target, &part, 10);
    if (gpu != call->gpu || *part == '\0')
        return gpu == call->gpu;
    if (strcmp(part, ".gpu") == 0)
        return call->slot == NO_SLOT;
    if (strcmp(part, ".mig") == 0)
        return call->slot != NO_SLOT;
    return *part == '.' && call->slot != NO_SLOT && strtol(part + 1, NULL, 10) == call->slot;
}

/* Whether a "fail", "delay" or "crash" line is about this call, and its last word. */
static bool ruled(const char *kind, const Call *call, char argument[32])
{
    for (const Line *line = state.has_rules ? first_line(kind) : NULL; line; line = line->next) {
        char function[80], target[32];
        *argument = '\0';
        if (sscanf(line->value, "%79s %31s %31s", function, target, argument) < 2)
            give_up("'%s %s' names no target", kind, line->value);
        if ((strcmp(function, "*") == 0 || strcmp(function, call->function) == 0) && targets(target, call))
            return true;
    }
    return false;
}

/* The counters are a file's memory where one is wished: others may read it at any time, also after a crash. */
static Counter *counter_of(const char *function)
{
    enum { FUNCTIONS = 128 };
    static Counter own[FUNCTIONS], *counters;
    const char *path = getenv("STANDIN_CALLS");
    if (!counters)
        counters = own;
    if (counters == own && path) {
        char name[4096];
        snprintf(name, sizeof name, "%s.%d", path, getpid());
        int file = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (file < 0 || ftruncate(file, sizeof own) != 0)
            give_up("cannot write %s: %s", name, strerror(errno));
        counters = mmap(NULL, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
    }
    for (size_t i = 0; i < FUNCTIONS; i++) {
        if (!*counters[i].function)
            snprintf(counters[i].function, sizeof counters[i].function, "%s", function);
        if (strcmp(counters[i].function, function) == 0)
            return &counters[i];
    }
    give_up("more than %d functions", FUNCTIONS);
}

static double monotonic_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static u64 wall_microseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (u64)now.tv_sec * 1000000 + (u64)now.tv_nsec / 1000;
}

/* Returns with the lock held, whatever the code; sleeps without it, so that a hung GPU does not stop the others. */
static Call begin(const char *function, Counter **counter, enum about about, uintptr_t which)
{
    Call call = {.function = function, .gpu = NO_GPU, .slot = NO_SLOT};
    char argument[32];
    double started = 0;
    pthread_mutex_lock(&lock);
    if (!*counter)
        *counter = counter_of(function);
    (*counter)->count++;
    for (;;) {
        refresh();
        call.code = locate(&call, about, which);
        if (call.code != SUCCESS || !state.has_rules)
            return call;
        started = started ? started : monotonic_seconds();
        if (!ruled("delay", &call, argument) || monotonic_seconds() - started >= strtod(argument, NULL))
            break;
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        pthread_mutex_lock(&lock);
    }
    if (ruled("crash", &call, argument))
        abort();
    if (ruled("fail", &call, argument))
        call.code = (Return)strtol(argument, NULL, 10);
    call.then = ruled("then", &call, argument);
    return call;
}

static void take_next_state(void)
{
    const char *path = getenv("STANDIN_STATE");
    char next[4096];
    snprintf(next, sizeof next, "%s.next", path);
    if (rename(next, path) != 0)
        give_up("cannot rename %s: %s", next, strerror(errno));
    state.looked = 0;
}

static void end(Call *call)
{
    if (call->then)
        take_next_state();
    pthread_mutex_unlock(&lock);
}

#define BEGIN(about, which)                                                                    \
    static Counter *counted;                                                                   \
    __attribute__((cleanup(end))) Call call = begin(__func__, &counted, about, (uintptr_t)(which)); \
    if (call.code != SUCCESS)                                                                  \
        return call.code

#define REQUIRE(condition)                                                                     \
    if (!(condition))                                                                          \
        return INVALID_ARGUMENT

/* ---- answers from single lines --------------------------------------------------------------------------------- */

#define UNTERMINATED "(unterminated)"

static Return answer_text(const Line *line, char *text, u32 size)
{
    REQUIRE(text);
    if (!line)
        return NOT_SUPPORTED;
    if (strcmp(line->value, UNTERMINATED) == 0) {
        memset(text, 'x', size);
        return SUCCESS;
    }
    if (strlen(line->value) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(text, line->value);
    return SUCCESS;
}

static Return answer_u64(const Line *line, u64 *value)
{
    REQUIRE(value);
    if (!line)
        return NOT_SUPPORTED;
    *value = number_in(line);
    return SUCCESS;
}

static Return answer_u32(const Line *line, u32 *value)
{
    u64 wide = 0;
    REQUIRE(value);
    Return code = answer_u64(line, &wide);
    if (code == SUCCESS)
        *value = (u32)wide;
    return code;
}

#define SYSTEM_TEXT(name, key)                                                                 \
    Return name(char *text, u32 size)                                                          \
    {                                                                                          \
        BEGIN(THE_SYSTEM, 0);                                                                  \
        return answer_text(first_line(key), text, size);                                       \
    }

#define SYSTEM_U32(name, key)                                                                  \
    Return name(u32 *value)                                                                    \
    {                                                                                          \
        BEGIN(THE_SYSTEM, 0);                                                                  \
        return answer_u32(first_line(key), value);                                             \
    }

#define DEVICE_TEXT(name, key)                                                                 \
    Return name(Device device, char *text, u32 size)                                           \
    {                                                                                          \
        BEGIN(A_DEVICE, device);                                                               \
        return answer_text(find("%s." key, call.prefix), text, size);                          \
    }

#define DEVICE_NUMBER(name, key, type)                                                         \
    Return name(Device device, type *value)                                                    \
    {                                                                                          \
        BEGIN(A_DEVICE, device);                                                               \
        return answer_##type(find("%s." key, call.prefix), value);                             \
    }

#define DEVICE_PAIR(name, key, type)                                                           \
    Return name(Device device, type *first, type *second)                                      \
    {                                                                                          \
        BEGIN(A_DEVICE, device);                                                               \
        REQUIRE(first && second);                                                              \
        const Line *pair = find("%s." key, call.prefix);                                       \
        if (!pair)                                                                             \
            return NOT_SUPPORTED;                                                              \
        char *rest;                                                                            \
        *first = (type)strtol(pair->value, &rest, 10);                                         \
        *second = (type)strtol(rest, NULL, 10);                                                \
        return SUCCESS;                                                                        \
    }

/* ---- the library ----------------------------------------------------------------------------------------------- */

static int held = -1;

static void hold(const char *kind)
{
    const Line *line = first_line(kind);
    if (line && (held = open(line->value, O_RDONLY | O_CLOEXEC)) < 0)
        give_up("cannot open '%s'", line->value);
}

static Return initialize(void)
{
    Return code = (Return)number_or(first_line("init"), SUCCESS);
    if (code == SUCCESS && initialized++ == 0) {
        hold("leaks");
        hold("holds");
    }
    return code;
}

#ifndef WITHOUT_nvmlInitWithFlags
Return nvmlInitWithFlags(u32 flags)
{
    (void)flags;
    BEGIN(THE_LIBRARY, 0);
    return initialize();
}
#endif

#ifndef WITHOUT_nvmlInit_v2
Return nvmlInit_v2(void)
{
    BEGIN(THE_LIBRARY, 0);
    return initialize();
}
#endif

#ifndef WITHOUT_nvmlShutdown
Return nvmlShutdown(void)
{
    BEGIN(THE_SYSTEM, 0);
    for (EventSet *set = sets; set < sets + MOST_SETS; set++)
        if (set->waits)
            give_up("nvmlShutdown in the midst of a wait for events");
    if (--initialized == 0) {
        memset(sets, 0, sizeof sets);
        if (held >= 0 && !first_line("leaks"))
            close(held);
        held = -1;
    }
    return SUCCESS;
}
#endif

#ifndef WITHOUT_nvmlErrorString
const char *nvmlErrorString(u32 code)
{
    static const char *const names[] = {
        "success", "uninitialized", "invalid argument", "not supported", "no permission", "already initialized",
        "not found", "insufficient size", "insufficient power", "driver not loaded", "timeout", "IRQ issue",
        "library not found", "function not found", "corrupted infoROM", "GPU is lost", "reset required",
        "operating system", "driver/library version mismatch", "in use", "memory", "no data",
        "vGPU ECC not supported", "insufficient resources", "frequency not supported",
        "argument version mismatch", "deprecated", "not ready", "GPU not found", "invalid state",
        "reset type not supported",
    };
    return code < sizeof names / sizeof *names ? names[code] : "unknown error";
}
#endif

#ifndef WITHOUT_nvmlSystemGetDriverVersion
SYSTEM_TEXT(nvmlSystemGetDriverVersion, "driver")
#endif

#ifndef WITHOUT_nvmlSystemGetNVMLVersion
SYSTEM_TEXT(nvmlSystemGetNVMLVersion, "nvml")
#endif

#ifndef WITHOUT_nvmlSystemGetCudaDriverVersion
SYSTEM_U32(nvmlSystemGetCudaDriverVersion, "cuda")
#endif

#ifndef WITHOUT_nvmlSystemGetCudaDriverVersion_v2
SYSTEM_U32(nvmlSystemGetCudaDriverVersion_v2, "cuda")
#endif

#ifndef WITHOUT_nvmlDeviceGetCount_v2
SYSTEM_U32(nvmlDeviceGetCount_v2, "count")
#endif

/* ---- a GPU ----------------------------------------------------------------------------------------------------- */

#ifndef WITHOUT_nvmlDeviceGetHandleByIndex_v2
Return nvmlDeviceGetHandleByIndex_v2(u32 index, Device *device)
{
    BEGIN(AN_INDEX, index);
    REQUIRE(device);
    *device = (Device)handle_of(&call);
    return SUCCESS;
}
#endif

#ifndef WITHOUT_nvmlDeviceGetUUID
DEVICE_TEXT(nvmlDeviceGetUUID, "uuid")
#endif

#ifndef WITHOUT_nvmlDeviceGetName
DEVICE_TEXT(nvmlDeviceGetName, "name")
#endif

#ifndef WITHOUT_nvmlDeviceGetVbiosVersion
DEVICE_TEXT(nvmlDeviceGetVbiosVersion, "vbios")
#endif

#ifndef WITHOUT_nvmlDeviceGetCudaComputeCapability
DEVICE_PAIR(nvmlDeviceGetCudaComputeCapability, "compute_capability", int)
#endif

#ifndef WITHOUT_nvmlDeviceGetComputeMode
DEVICE_NUMBER(nvmlDeviceGetComputeMode, "compute_mode", u32)
#endif

#ifndef WITHOUT_nvmlDeviceGetMinorNumber
DEVICE_NUMBER(nvmlDeviceGetMinorNumber, "minor", u32)
#endif

#ifndef WITHOUT_nvmlDeviceGetVirtualizationMode
DEVICE_NUMBER(nvmlDeviceGetVirtualizationMode, "virtualization_mode", u32)
#endif

#ifndef WITHOUT_nvmlDeviceGetNumaNodeId
DEVICE_NUMBER(nvmlDeviceGetNumaNodeId, "numa_node", u32)
#endif

#ifndef WITHOUT_nvmlDeviceGetPciInfo_v3
Return nvmlDeviceGetPciInfo_v3(Device device, Pci *pci)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(pci);
    memset(pci, 0, sizeof *pci);
    Return code = answer_text(find("%s.pci", call.prefix), pci->id, sizeof pci->id);
    if (code != SUCCESS)
        return code;
    if (sscanf(pci->id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device) != 3)
        give_up("'%s' is not a PCI address", pci->id);
    snprintf(pci->legacy_id, sizeof pci->legacy_id, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0xff);
    return SUCCESS;
}
#endif

/* v1 counts what the driver reserves as used, v2 tells it apart. */
static Return memory(const Call *call, MemoryV2 *memory)
{
    const Line *total = find("%s.memory.total", call->prefix), *used = find("%s.memory.used", call->prefix);
    if (!total || !used)
        return NOT_SUPPORTED;
    memory->total = number_in(total);
    memory->used = number_in(used);
    memory->reserved = number_or(find("%s.memory.reserved", call->prefix), 0);
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

#ifndef WITHOUT_nvmlDeviceGetMemoryInfo
Return nvmlDeviceGetMemoryInfo(Device device, Memory *info)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(info);
    MemoryV2 parts;
    Return code = memory(&call, &parts);
    if (code == SUCCESS)
        *info = (Memory){.total = parts.total, .free = parts.free, .used = parts.used + parts.reserved};
    return code;
}
#endif

#ifndef WITHOUT_nvmlDeviceGetMemoryInfo_v2
Return nvmlDeviceGetMemoryInfo_v2(Device device, MemoryV2 *info)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(info);
    if (info->version != VERSION(MemoryV2, 2))
        return ARGUMENT_VERSION_MISMATCH;
    return memory(&call, info);
}
#endif

#ifndef WITHOUT_nvmlDeviceGetUtilizationRates
Return nvmlDeviceGetUtilizationRates(Device device, Utilization *rates)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(rates);
    if (mig_enabled(call.gpu))
        return NOT_SUPPORTED;
    Return code = answer_u32(find("%s.utilization.gpu", call.prefix), &rates->gpu);
    return code ? code : answer_u32(find("%s.utilization.memory", call.prefix), &rates->memory);
}
#endif

#define CODEC_UTILIZATION(name, key)                                                           \
    Return name(Device device, u32 *percent, u32 *period)                                      \
    {                                                                                          \
        BEGIN(A_DEVICE, device);                                                               \
        REQUIRE(percent && period);                                                            \
        *period = SAMPLING_PERIOD_MICROSECONDS;                                                \
        return mig_enabled(call.gpu) ? NOT_SUPPORTED                                           \
                                     : answer_u32(find("%s." key, call.prefix), percent);      \
    }

#ifndef WITHOUT_nvmlDeviceGetEncoderUtilization
CODEC_UTILIZATION(nvmlDeviceGetEncoderUtilization, "encoder")
#endif

#ifndef WITHOUT_nvmlDeviceGetDecoderUtilization
CODEC_UTILIZATION(nvmlDeviceGetDecoderUtilization, "decoder")
#endif

#ifndef WITHOUT_nvmlDeviceGetTemperatureV
Return nvmlDeviceGetTemperatureV(Device device, Temperature *temperature)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(temperature);
    if (temperature->version != VERSION(Temperature, 1))
        return ARGUMENT_VERSION_MISMATCH;
    REQUIRE(temperature->sensor == 0);
    return answer_u32(find("%s.temperature", call.prefix), (u32 *)&temperature->celsius);
}
#endif

#ifndef WITHOUT_nvmlDeviceGetTemperature
Return nvmlDeviceGetTemperature(Device device, u32 sensor, u32 *celsius)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(sensor == 0);
    return answer_u32(find("%s.temperature", call.prefix), celsius);
}
#endif

#ifndef WITHOUT_nvmlDeviceGetPowerUsage
DEVICE_NUMBER(nvmlDeviceGetPowerUsage, "power", u32)
#endif

#ifndef WITHOUT_nvmlDeviceGetEnforcedPowerLimit
DEVICE_NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power.enforced_limit", u32)
#endif

#ifndef WITHOUT_nvmlDeviceGetPowerManagementLimit
DEVICE_NUMBER(nvmlDeviceGetPowerManagementLimit, "power.limit", u32)
#endif

#ifndef WITHOUT_nvmlDeviceGetPowerManagementDefaultLimit
DEVICE_NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, "power.default_limit", u32)
#endif

#ifndef WITHOUT_nvmlDeviceGetPowerManagementLimitConstraints
DEVICE_PAIR(nvmlDeviceGetPowerManagementLimitConstraints, "power.limits", u32)
#endif

#ifndef WITHOUT_nvmlDeviceGetTotalEnergyConsumption
DEVICE_NUMBER(nvmlDeviceGetTotalEnergyConsumption, "energy", u64)
#endif

#ifndef WITHOUT_nvmlDeviceGetConfComputeMemSizeInfo
Return nvmlDeviceGetConfComputeMemSizeInfo(Device device, ConfComputeMemory *info)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(info);
    Return code = answer_u64(find("%s.cc.protected_kib", call.prefix), &info->protected_kib);
    return code ? code : answer_u64(find("%s.cc.unprotected_kib", call.prefix), &info->unprotected_kib);
}
#endif

static void answer_field(const Line *line, Field *field)
{
    static const char *const types[] = {"double", "uint", "ulong", "ulonglong", "slonglong", "sint", "ushort"};
    const Word *words = words_of(line, 2), *value = &words[1];
    const char *type = words[0].text;
    if (strcmp(type, "error") == 0) {
        field->code = (u32)number(value);
        return;
    }
    for (u32 i = 0; i < sizeof types / sizeof *types; i++) {
        if (strcmp(type, types[i]) != 0)
            continue;
        field->code = SUCCESS;
        field->type = i;
        memset(&field->value, 0, sizeof field->value);
        switch (i) { /* numbered as nvmlValueType_t */
        case 0: field->value.d = strtod(value->text, NULL); break;
        case 1: field->value.ui = (u32)number(value); break;
        case 2: field->value.ul = (unsigned long)number(value); break;
        case 3: field->value.ull = number(value); break;
        case 4: field->value.sll = (long long)number(value); break;
        case 5: field->value.si = (int)number(value); break;
        case 6: field->value.us = (unsigned short)number(value); break;
        }
        return;
    }
    give_up("'%s %s' has no known type", line->key, line->value);
}

#ifndef WITHOUT_nvmlDeviceGetFieldValues
Return nvmlDeviceGetFieldValues(Device device, int count, Field *fields)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(fields && count > 0);
    int64_t now = (int64_t)wall_microseconds();
    for (Field *field = fields; field < fields + count; field++) {
        field->code = NOT_SUPPORTED;
        field->timestamp = now;
        field->latency = 1;
        const Line *line = find("%s.field.%u.%u", call.prefix, field->id, field->scope);
        if (line)
            answer_field(line, field);
    }
    return SUCCESS;
}
#endif

/* ---- health ---------------------------------------------------------------------------------------------------- */

static const Line *clock_of(const char *prefix, const char *key, u32 domain)
{
    static const char *const domains[] = {"graphics", "sm", "memory", "video"};
    return find("%s.%s.%s", prefix, key, domains[domain]);
}

#define DEVICE_CLOCK(name, key)                                                                \
    Return name(Device device, u32 domain, u32 *megahertz)                                     \
    {                                                                                          \
        BEGIN(A_DEVICE, device);                                                               \
        REQUIRE(domain < 4);                                                                   \
        return answer_u32(clock_of(call.prefix, key, domain), megahertz);                      \
    }

#ifndef WITHOUT_nvmlDeviceGetClockInfo
DEVICE_CLOCK(nvmlDeviceGetClockInfo, "clock")
#endif

#ifndef WITHOUT_nvmlDeviceGetMaxClockInfo
DEVICE_CLOCK(nvmlDeviceGetMaxClockInfo, "max_clock")
#endif

#ifndef WITHOUT_nvmlDeviceGetCurrentClocksEventReasons
DEVICE_NUMBER(nvmlDeviceGetCurrentClocksEventReasons, "clock.events", u64)
#endif

#ifndef WITHOUT_nvmlDeviceGetSupportedClocksEventReasons
DEVICE_NUMBER(nvmlDeviceGetSupportedClocksEventReasons, "clock.supported_events", u64)
#endif

#ifndef WITHOUT_nvmlDeviceGetCurrentClocksThrottleReasons
DEVICE_NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, "clock.events", u64)
#endif

#ifndef WITHOUT_nvmlDeviceGetSupportedClocksThrottleReasons
DEVICE_NUMBER(nvmlDeviceGetSupportedClocksThrottleReasons, "clock.supported_events", u64)
#endif

#ifndef WITHOUT_nvmlDeviceGetGpuFabricInfoV
Return nvmlDeviceGetGpuFabricInfoV(Device device, Fabric *fabric)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(fabric);
    if (fabric->version != VERSION(Fabric, 2))
        return ARGUMENT_VERSION_MISMATCH;
    const Line *line = find("%s.fabric", call.prefix);
    if (!line)
        return NOT_SUPPORTED;
    memset(fabric, 0xFF, sizeof *fabric); /* what the struct has between its fields is nobody's */
    fabric->state = (unsigned char)number(&line->words[0]);
    fabric->status = (u32)number(&line->words[1]);
    return SUCCESS;
}
#endif

#ifndef WITHOUT_nvmlDeviceGetPerformanceState
DEVICE_NUMBER(nvmlDeviceGetPerformanceState, "performance_state", u32)
#endif

#ifndef WITHOUT_nvmlDeviceGetNumFans
DEVICE_NUMBER(nvmlDeviceGetNumFans, "fans", u32)
#endif

#ifndef WITHOUT_nvmlDeviceGetFanSpeed_v2
Return nvmlDeviceGetFanSpeed_v2(Device device, u32 fan, u32 *percent)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(fan < number_or(find("%s.fans", call.prefix), 0));
    return answer_u32(find("%s.fan.%u", call.prefix, fan), percent);
}
#endif

#ifndef WITHOUT_nvmlDeviceGetMemoryErrorCounter
Return nvmlDeviceGetMemoryErrorCounter(Device device, u32 type, u32 counter, u32 location, u64 *count)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(count && type < 2 && counter < 2 && location < 8);
    return answer_u64(find("%s.ecc.%u.%u.%u", call.prefix, type, counter, location), count);
}
#endif

/* ---- GPM ------------------------------------------------------------------------------------------------------- */

/* Samples are memory of the caller's: they need no initialisation (nvml.h names no such error for the two). */
#ifndef WITHOUT_nvmlGpmSampleAlloc
Return nvmlGpmSampleAlloc(GpmSample **sample)
{
    BEGIN(THE_LIBRARY, 0);
    REQUIRE(sample);
    *sample = calloc(1, sizeof **sample);
    return SUCCESS;
}
#endif

#ifndef WITHOUT_nvmlGpmSampleFree
Return nvmlGpmSampleFree(GpmSample *sample)
{
    BEGIN(THE_LIBRARY, 0);
    REQUIRE(sample);
    free(sample); /* glibc ends the process where it is freed twice */
    return SUCCESS;
}
#endif

#ifndef WITHOUT_nvmlGpmQueryDeviceSupport
Return nvmlGpmQueryDeviceSupport(Device device, GpmSupport *support)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(support);
    if (support->version != 1)
        return ARGUMENT_VERSION_MISMATCH;
    support->supported = find("gpu.%d.gpm", call.gpu) != NULL;
    return SUCCESS;
}
#endif

/* The sample keeps what the device's line says now: that is what the interval which it ends was like. */
static Return take_sample(const Call *call, uintptr_t of, GpmSample *sample)
{
    const Line *line = find("%s.gpm", call->prefix);
    REQUIRE(sample);
    if (!line)
        return NOT_SUPPORTED;
    sample->taken = true;
    sample->strict = false;
    sample->of = of;
    sample->at = monotonic_seconds();
    sample->count = 0;
    for (const Word *word = line->words; word < line->words + line->count; word++) {
        const char *value = strchr(word->text, '=');
        sample->strict |= strcmp(word->text, "strict") == 0;
        if (!value)
            continue;
        if (sample->count == MOST_MEASURED)
            give_up("more than %d metrics", MOST_MEASURED);
        bool failed = strncmp(++value, "error:", 6) == 0;
        u32 i = sample->count++;
        sample->measured[i].id = (u32)strtoul(word->text, NULL, 10);
        sample->measured[i].code = failed ? (u32)strtoul(value + 6, NULL, 10) : SUCCESS;
        sample->measured[i].value = failed ? 0 : strtod(value, NULL); /* "nan" and "inf" too */
    }
    return SUCCESS;
}

/* Whether real drivers sample a partitioned GPU as a whole is not documented; nobody should need to ask. */
#ifndef WITHOUT_nvmlGpmSampleGet
Return nvmlGpmSampleGet(Device device, GpmSample *sample)
{
    BEGIN(A_DEVICE, device);
    return mig_enabled(call.gpu) ? NOT_SUPPORTED : take_sample(&call, handle_of(&call), sample);
}
#endif

#ifndef WITHOUT_nvmlGpmMigSampleGet
Return nvmlGpmMigSampleGet(Device device, u32 gpu_instance, GpmSample *sample)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(call.slot == NO_SLOT && locate_gpu_instance(&call, call.gpu, gpu_instance));
    return take_sample(&call, handle_of_gpu_instance(call.gpu, gpu_instance), sample);
}
#endif

static void answer_metric(const GpmSample *sample, GpmMetric *metric)
{
    metric->code = NOT_SUPPORTED;
    for (u32 i = 0; i < sample->count; i++) {
        if (sample->measured[i].id == metric->id) {
            metric->code = sample->measured[i].code;
            metric->value = sample->measured[i].value;
        }
    }
}

/* nvml.h asks for samples more than 100 ms apart, and does not say what happens otherwise: here INVALID_ARGUMENT. */
#ifndef WITHOUT_nvmlGpmMetricsGet
static bool far_apart(const GpmSample *first, const GpmSample *second)
{
    return second->at - first->at > number_or(first_line("gpm_apart_ms"), 100) / 1000.0;
}

Return nvmlGpmMetricsGet(GpmMetrics *get)
{
    BEGIN(THE_SYSTEM, 0);
    REQUIRE(get && get->count <= GPM_METRICS);
    if (get->version != 1)
        return ARGUMENT_VERSION_MISMATCH;
    REQUIRE(get->first && get->second && get->first->taken && get->second->taken);
    REQUIRE(get->first->of == get->second->of && far_apart(get->first, get->second));
    for (u32 i = 0; i < get->count; i++)
        answer_metric(get->second, &get->metrics[i]);
    for (u32 i = 0; i < get->count && get->second->strict; i++)
        REQUIRE(get->metrics[i].code != NOT_SUPPORTED);
    return SUCCESS;
}
#endif

/* ---- MIG ------------------------------------------------------------------------------------------------------- */

#ifndef WITHOUT_nvmlDeviceGetMigMode
Return nvmlDeviceGetMigMode(Device device, u32 *current, u32 *pending)
{
    BEGIN(A_DEVICE, device);
    Return code = answer_u32(find("%s.mig.mode", call.prefix), current);
    return code ? code : answer_u32(find("%s.mig.pending", call.prefix), pending);
}
#endif

#ifndef WITHOUT_nvmlDeviceGetMaxMigDeviceCount
Return nvmlDeviceGetMaxMigDeviceCount(Device device, u32 *count)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(count && call.slot == NO_SLOT);
    *count = (u32)mig_slots(call.gpu);
    return SUCCESS;
}
#endif

#ifndef WITHOUT_nvmlDeviceGetMigDeviceHandleByIndex
Return nvmlDeviceGetMigDeviceHandleByIndex(Device device, u32 index, Device *instance)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(instance && call.slot == NO_SLOT);
    if (!find("%s.mig.mode", call.prefix))
        return NOT_SUPPORTED;
    REQUIRE(!mig_enabled(call.gpu) || (int)index < mig_slots(call.gpu));
    if (!mig_exists(call.gpu, (int)index))
        return NOT_FOUND;
    point_at(&call, call.gpu, (int)index);
    *instance = (Device)handle_of(&call);
    return SUCCESS;
}
#endif

#ifndef WITHOUT_nvmlDeviceGetDeviceHandleFromMigDeviceHandle
Return nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device instance, Device *device)
{
    BEGIN(A_DEVICE, instance);
    REQUIRE(device && call.slot != NO_SLOT);
    point_at(&call, call.gpu, NO_SLOT);
    *device = (Device)handle_of(&call);
    return SUCCESS;
}
#endif

#ifndef WITHOUT_nvmlDeviceIsMigDeviceHandle
Return nvmlDeviceIsMigDeviceHandle(Device device, u32 *is_instance)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(is_instance);
    *is_instance = call.slot != NO_SLOT;
    return SUCCESS;
}
#endif

#define INSTANCE_ID(name, key)                                                                 \
    Return name(Device device, u32 *id)                                                        \
    {                                                                                          \
        BEGIN(A_DEVICE, device);                                                               \
        REQUIRE(call.slot != NO_SLOT);                                                         \
        return answer_u32(find("%s." key, call.prefix), id);                                   \
    }

#ifndef WITHOUT_nvmlDeviceGetGpuInstanceId
INSTANCE_ID(nvmlDeviceGetGpuInstanceId, "gi")
#endif

#ifndef WITHOUT_nvmlDeviceGetComputeInstanceId
INSTANCE_ID(nvmlDeviceGetComputeInstanceId, "ci")
#endif

#ifndef WITHOUT_nvmlDeviceGetGpuInstanceById
Return nvmlDeviceGetGpuInstanceById(Device device, u32 id, void **instance)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(instance && call.slot == NO_SLOT);
    if (!mig_enabled(call.gpu))
        return NOT_SUPPORTED;
    if (!locate_gpu_instance(&call, call.gpu, id))
        return NOT_FOUND;
    *instance = (void *)handle_of_gpu_instance(call.gpu, id);
    return SUCCESS;
}
#endif

#ifndef WITHOUT_nvmlGpuInstanceGetInfo
Return nvmlGpuInstanceGetInfo(void *instance, GpuInstanceInfo *info)
{
    BEGIN(A_GPU_INSTANCE, instance);
    REQUIRE(info);
    const Line *line = find("%s.placement", call.prefix);
    if (!line)
        return NOT_SUPPORTED;
    const Word *words = words_of(line, 3);
    info->id = (u32)(uintptr_t)instance;
    info->profile_id = (u32)number(&words[0]);
    info->start = (u32)number(&words[1]);
    info->size = (u32)number(&words[2]);
    point_at(&call, call.gpu, NO_SLOT);
    info->device = (Device)handle_of(&call);
    return SUCCESS;
}
#endif

#ifndef WITHOUT_nvmlDeviceGetAttributes_v2
Return nvmlDeviceGetAttributes_v2(Device device, Attributes *attributes)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(attributes && call.slot != NO_SLOT);
    const Line *line = find("%s.attributes", call.prefix);
    if (!line)
        return NOT_SUPPORTED;
    const Word *words = words_of(line, 9);
    for (int i = 0; i < 8; i++)
        attributes->counts[i] = (u32)number(&words[i]);
    attributes->memory_mib = number(&words[8]);
    return SUCCESS;
}
#endif

/* ---- processes ------------------------------------------------------------------------------------------------- */

/* Appends the rows of one device (its own, not its instances') to `rows`, or counts them if that is NULL. */
static u32 append_rows(const char *prefix, const char *kind, size_t row_size, char *rows, u32 count)
{
    for (const Line *line = find("%s.process", prefix); line; line = line->next) {
        const Word *words = words_of(line, 6);
        if (kind && strcmp(words[0].text, kind) != 0)
            continue;
        if (rows) {
            ProcessRow row;
            memset(&row, 0, sizeof row); /* its padding too: a caller with other structs reads that as well */
            row.pid = (u32)number(&words[1]);
            row.used = number(&words[2]);
            row.gi = (u32)number(&words[3]);
            row.ci = (u32)number(&words[4]);
            row.cc_protected = number(&words[5]);
            memcpy(rows + count * row_size, &row, row_size);
        }
        count++;
    }
    return count;
}

/* How many rows a driver as in nvtop's issue 110 counts beyond those that it writes. */
static u32 garbage_rows(const Call *call)
{
    return (u32)number_or(find("%s.garbage", call->prefix), 0);
}

/* A GPU's list has its instances' rows as well. */
static u32 all_rows(const Call *call, const char *kind, size_t row_size, char *rows)
{
    u32 count = append_rows(call->prefix, kind, row_size, rows, 0);
    for (int slot = 0; call->slot == NO_SLOT && slot < mig_slots(call->gpu); slot++) {
        Call instance = *call;
        point_at(&instance, call->gpu, slot);
        if (mig_exists(call->gpu, slot))
            count = append_rows(instance.prefix, kind, row_size, rows, count);
    }
    return count;
}

static Return process_rows(const Call *call, const char *kind, size_t row_size, u32 *count, void *rows)
{
    REQUIRE(count);
    if (!find("%s.processes", call->prefix))
        return NOT_SUPPORTED;
    u32 needed = all_rows(call, kind, row_size, NULL) + garbage_rows(call);
    bool fits = *count >= needed;
    *count = needed;
    if (!fits)
        return INSUFFICIENT_SIZE;
    REQUIRE(rows || !needed);
    all_rows(call, kind, row_size, rows);
    return SUCCESS;
}

/* In the 535 window rows are written past what a caller with 24-byte structs counted on: so did those drivers. */
static size_t v3_row_size(void)
{
    return number_or(first_line("abi535"), 0) ? ROW_535 : ROW_V2;
}

#define PROCESS_LIST(name, kind, row_size)                                                     \
    Return name(Device device, u32 *count, void *rows)                                         \
    {                                                                                          \
        BEGIN(A_DEVICE, device);                                                               \
        return process_rows(&call, kind, row_size, count, rows);                               \
    }

#ifndef WITHOUT_nvmlDeviceGetComputeRunningProcesses
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, "compute", ROW_V1)
#endif

#ifndef WITHOUT_nvmlDeviceGetComputeRunningProcesses_v2
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, "compute", ROW_V2)
#endif

#ifndef WITHOUT_nvmlDeviceGetComputeRunningProcesses_v3
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, "compute", v3_row_size())
#endif

#ifndef WITHOUT_nvmlDeviceGetGraphicsRunningProcesses
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, "graphics", ROW_V1)
#endif

#ifndef WITHOUT_nvmlDeviceGetGraphicsRunningProcesses_v2
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics", ROW_V2)
#endif

#ifndef WITHOUT_nvmlDeviceGetGraphicsRunningProcesses_v3
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics", v3_row_size())
#endif

#ifndef WITHOUT_nvmlDeviceGetMPSComputeRunningProcesses
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, "mps", ROW_V1)
#endif

#ifndef WITHOUT_nvmlDeviceGetMPSComputeRunningProcesses_v2
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps", ROW_V2)
#endif

#ifndef WITHOUT_nvmlDeviceGetMPSComputeRunningProcesses_v3
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps", v3_row_size())
#endif

#ifndef WITHOUT_nvmlDeviceGetRunningProcessDetailList
Return nvmlDeviceGetRunningProcessDetailList(Device device, ProcessDetailList *list)
{
    static const char *const kinds[] = {"compute", "graphics", "mps", NULL /* all */};
    BEGIN(A_DEVICE, device);
    REQUIRE(list);
    if (list->version != VERSION(ProcessDetailList, 1))
        return ARGUMENT_VERSION_MISMATCH;
    REQUIRE(list->mode < sizeof kinds / sizeof *kinds);
    return process_rows(&call, kinds[list->mode], sizeof(ProcessRow), &list->count, list->rows);
}
#endif

/* Writes the samples to one of the two arrays, if any, and returns their number. */
static u32 newer_samples(const Call *call, u64 since, u64 now, Sample *samples, SampleInfo *infos)
{
    u32 count = 0;
    bool all = find("%s.garbage", call->prefix);
    for (const Line *line = find("%s.sample", call->prefix); line; line = line->next) {
        const Word *words = words_of(line, 8);
        SampleInfo info = {
            .pid = (u32)number(&words[0]),
            .timestamp = strcmp(words[1].text, "now") == 0 ? now : number(&words[1]),
            .sm = (u32)number(&words[2]),
            .memory = (u32)number(&words[3]),
            .encoder = (u32)number(&words[4]),
            .decoder = (u32)number(&words[5]),
            .jpeg = (u32)number(&words[6]),
            .ofa = (u32)number(&words[7]),
        };
        if (info.timestamp <= since && !all)
            continue;
        if (infos)
            infos[count] = info;
        if (samples)
            samples[count] = (Sample){info.pid, info.timestamp, info.sm, info.memory, info.encoder, info.decoder};
        count++;
    }
    return count;
}

/* Answers a call for samples with one of the two arrays; `count` is its room, and then the number of rows. */
static Return give_samples(const Call *call, u64 since, u32 *count, Sample *samples, SampleInfo *infos)
{
    u64 now = wall_microseconds();
    u32 needed = newer_samples(call, since, now, NULL, NULL) + garbage_rows(call);
    bool fits = (samples || infos) && *count >= needed;
    *count = needed;
    if (!needed)
        return NOT_FOUND;
    if (!fits)
        return INSUFFICIENT_SIZE;
    newer_samples(call, since, now, samples, infos);
    return SUCCESS;
}

static bool has_samples(const Call *call)
{
    return !mig_enabled(call->gpu) && find("%s.samples", call->prefix);
}

#ifndef WITHOUT_nvmlDeviceGetProcessUtilization
Return nvmlDeviceGetProcessUtilization(Device device, Sample *samples, u32 *count, u64 since)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(count);
    return has_samples(&call) ? give_samples(&call, since, count, samples, NULL) : NOT_SUPPORTED;
}
#endif

/* nvml.h: without an array it returns INSUFFICIENT_SIZE and the count, also if there are no samples. */
#ifndef WITHOUT_nvmlDeviceGetProcessesUtilizationInfo
Return nvmlDeviceGetProcessesUtilizationInfo(Device device, SampleInfos *get)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(get);
    if (get->version != VERSION(SampleInfos, 1))
        return ARGUMENT_VERSION_MISMATCH;
    if (!has_samples(&call))
        return NOT_SUPPORTED;
    Return code = give_samples(&call, get->since, &get->count, NULL, get->samples);
    return get->samples ? code : INSUFFICIENT_SIZE;
}
#endif

/* ---- events ---------------------------------------------------------------------------------------------------- */

enum { XID = 8 };

#ifndef WITHOUT_nvmlDeviceGetSupportedEventTypes
DEVICE_NUMBER(nvmlDeviceGetSupportedEventTypes, "events", u64)
#endif

#ifndef WITHOUT_nvmlEventSetCreate
Return nvmlEventSetCreate(EventSet **set)
{
    BEGIN(THE_SYSTEM, 0);
    REQUIRE(set);
    for (EventSet *one = sets; one < sets + MOST_SETS; one++) {
        if (one->used)
            continue;
        *one = (EventSet){.used = true};
        *set = one;
        return SUCCESS;
    }
    give_up("more than %d event sets that were not freed", MOST_SETS);
}
#endif

#ifndef WITHOUT_nvmlEventSetFree
Return nvmlEventSetFree(EventSet *set)
{
    BEGIN(AN_EVENT_SET, set);
    if (set->waits)
        give_up("nvmlEventSetFree in the midst of a wait");
    set->used = false;
    return SUCCESS;
}
#endif

enum { ANY_GPU = -1 };

/* The line of the first event of a GPU after that serial, or NULL. */
static const Line *xid_after(int gpu, u64 serial, u64 *found)
{
    const Line *first = NULL;
    for (const Line *line = first_line("xid"); line; line = line->next) {
        char *rest;
        u64 its = strtoull(line->value, &rest, 10);
        if (its > serial && (gpu == ANY_GPU || strtol(rest, NULL, 10) == gpu) && (!first || its < *found)) {
            first = line;
            *found = its;
        }
    }
    return first;
}

#ifndef WITHOUT_nvmlDeviceRegisterEvents
Return nvmlDeviceRegisterEvents(Device device, u64 types, EventSet *set)
{
    BEGIN(A_DEVICE, device);
    REQUIRE(call.slot == NO_SLOT && set >= sets && set < sets + MOST_SETS && set->used && set->count < MOST_IN_SET);
    if (types & ~number_or(find("%s.events", call.prefix), 0))
        return NOT_SUPPORTED;
    u64 last = 0, serial;
    for (const Line *line = first_line("xid"); line; line = line->next) {
        serial = strtoull(line->value, NULL, 10);
        last = serial > last ? serial : last;
    }
    set->gpus[set->count].device = (uintptr_t)device;
    set->gpus[set->count++].told = last;
    return SUCCESS;
}
#endif

static void fill_event(const Line *line, uintptr_t device, EventData *data)
{
    const Word *words = words_of(line, 5);
    *data = (EventData){(Device)device, XID, number(&words[2]), (u32)number(&words[3]), (u32)number(&words[4])};
}

static bool take_event_of_any(EventData *data)
{
    static u64 told;
    const Line *line = xid_after(ANY_GPU, told, &told);
    if (!line)
        return false;
    Call at;
    point_at(&at, atoi(strchr(line->value, ' ')), NO_SLOT);
    fill_event(line, handle_of(&at), data);
    return true;
}

static bool take_event(EventSet *set, EventData *data)
{
    if (number_or(first_line("one_queue"), 0))
        return take_event_of_any(data);
    for (u32 i = 0; i < set->count; i++) {
        Call at;
        u64 serial = 0;
        const Line *line = NULL;
        if (locate_handle(&at, set->gpus[i].device))
            line = xid_after(at.gpu, set->gpus[i].told, &serial);
        if (!line)
            continue;
        set->gpus[i].told = serial;
        fill_event(line, set->gpus[i].device, data);
        return true;
    }
    return false;
}

#ifndef WITHOUT_nvmlEventSetWait_v2
Return nvmlEventSetWait_v2(EventSet *set, EventData *data, u32 milliseconds)
{
    double started = monotonic_seconds();
    BEGIN(AN_EVENT_SET, set);
    REQUIRE(data);
    while (!take_event(set, data)) {
        if (monotonic_seconds() - started >= milliseconds / 1e3)
            return TIMEOUT;
        set->waits++;
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
        pthread_mutex_lock(&lock);
        set->waits--;
        refresh();
    }
    return SUCCESS;
}
#endif
