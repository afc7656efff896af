/* A stand-in for libnvidia-ml.so.1 with the calls that pytest_llmgpu.profiling makes, so that tests need no GPU.
 *
 *     cc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 nvml_stub.c
 *
 * put on LD_LIBRARY_PATH before the process starts. Environment variables drive it:
 *
 *     NVML_STUB_GPUS             devices (1)
 *     NVML_STUB_PCIE_US          microseconds nvmlDeviceGetPcieThroughput blocks (0)
 *     NVML_STUB_PCIE_KB          base of its answer: device i sends (i + 1) and receives 2 (i + 1) times as much (1000)
 *     NVML_STUB_PCIE_TOGETHER    none of these calls returns before so many are inside at once (0)
 *     NVML_STUB_NVLINKS          active links of each device, to a switch (0: links are not supported)
 *     NVML_STUB_NVLINKS_DIRECT   1: those links lead to the other device of the pair instead (0)
 *     NVML_STUB_GPM              1: the devices have GPM; device i answers 10 times the metric's number plus i (0)
 *     NVML_STUB_GPM_REFUSED      numbers of metrics it does not have: "20,21@1" ("")
 *     NVML_STUB_FIELDS           field ids that are supported: "138,139,197@1" ("")
 *     NVML_STUB_FIELD_STEP       the growth of each field of a device with every call, in its own unit (1000)
 *     NVML_STUB_RING             samples of utilisation: absent, idle (no samples), or a percentage, with one more sample of
 *                                200 ms with every call that reads them (absent)
 *     NVML_STUB_ECC              "1:3": after 3 readings of it device 1 has one uncorrected memory error more each time
 *     NVML_STUB_XID              "1:3": the same for Xid errors, reported as events
 *     NVML_STUB_PROCESSES        how many compute processes: "2@1" on device 1, "0" on each (1)
 *     NVML_STUB_UNSUPPORTED      calls that are not supported: "nvmlDeviceGetPowerUsage,nvmlDeviceGetClockInfo@1",
 *                                @1 on device 1 only
 *     NVML_STUB_LOST             "1:20": device 1 is lost after 20 calls on it
 *     NVML_STUB_HANG             "nvmlDeviceGetPowerUsage:3": that call never returns after 3 times; "...:3@1" on device 1
 *     NVML_STUB_HANGING          named pipe that is opened and closed when that call begins to hang
 *     NVML_STUB_ENERGY_US        microseconds nvmlDeviceGetTotalEnergyConsumption blocks (0)
 *     NVML_STUB_INIT             code that nvmlInit returns (0)
 *     NVML_STUB_SHUTDOWN         code that nvmlShutdown returns (0)
 *     NVML_STUB_PRINT            set: nvmlInit and each call on a device print a line to stdout
 *     NVML_STUB_LOG              file that gets a line per device call: start_us end_us thread process function device
 *
 * Answers tell devices apart: device i is at 40 + i %, has 10 + i GiB in use beside 1 GiB that the driver reserves,
 * draws 300 + i W at 1500 + i MHz; its energy counter grows by 5 + i J with every call. Devices 2 n and 2 n + 1 share a PCIe switch.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };
enum { FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15, VERSION_MISMATCH = 25 };
enum { MAX_GPUS = 64, REMOTE_IS_GPU = 0, REMOTE_IS_SWITCH = 2, LINKS_OF_MODEL = 18 };
#define GIB (1ull << 30)
#define MEMORY_V2 0x02000028u

typedef void *Device; /* index + 1, so that none is NULL */
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { char legacy[16]; unsigned domain, bus, device, pci_id, subsystem_id; char bus_id[32]; } PciInfo;

static atomic_int calls_on[MAX_GPUS];
static atomic_int calls_before_hang;

static int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static int number(Device device) { return (int)(intptr_t)device - 1; }

static long long now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000ll + time.tv_nsec / 1000;
}

static void note(const char *function, Device device, long long start_us) {
    const char *path = getenv("NVML_STUB_LOG");
    if (!path) return;
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0) return;
    /* One line in one write, so that threads do not mix. */
    dprintf(file, "%lld %lld %ld %d %s %d\n", start_us, now_us(), syscall(SYS_gettid), getpid(), function, number(device));
    close(file);
}

/* Whether a list such as "one,two@1" has that name for that device. */
static int listed(const char *setting, const char *function, Device device) {
    char entry[128];
    const char *rest = getenv(setting);
    while (rest && *rest) {
        size_t length = strcspn(rest, ",");
        snprintf(entry, sizeof entry, "%.*s", (int)length, rest);
        char *at = strchr(entry, '@');
        if (at) *at++ = '\0';
        if (!strcmp(entry, function) && (!at || atoi(at) == number(device))) return 1;
        rest += length + (rest[length] == ',');
    }
    return 0;
}

static int listed_number(const char *setting, unsigned id, Device device) {
    char text[16];
    snprintf(text, sizeof text, "%u", id);
    return listed(setting, text, device);
}

static int unsupported(const char *function, Device device) { return listed("NVML_STUB_UNSUPPORTED", function, device); }

static int lost(Device device) {
    int which, after;
    const char *text = getenv("NVML_STUB_LOST");
    int calls = atomic_fetch_add(&calls_on[number(device) % MAX_GPUS], 1);
    return text && sscanf(text, "%d:%d", &which, &after) == 2 && which == number(device) && calls >= after;
}

static void hang(const char *function, Device device) {
    const char *text = getenv("NVML_STUB_HANG");
    size_t length = strlen(function);
    if (!text || strncmp(text, function, length) || text[length] != ':') return;
    const char *at = strchr(text, '@');
    if (at && atoi(at + 1) != number(device)) return;
    if (atomic_fetch_add(&calls_before_hang, 1) < atoi(text + length + 1)) return;
    const char *pipe = getenv("NVML_STUB_HANGING");
    if (pipe) close(open(pipe, O_WRONLY | O_CLOEXEC));
    for (;;) pause();
}

/* What every call on a device does before it answers; blocks for `us`. */
static int enter(const char *function, Device device, int us) {
    long long start_us = now_us();
    int code = lost(device) ? GPU_IS_LOST : unsupported(function, device) ? NOT_SUPPORTED : SUCCESS;
    hang(function, device);
    if (getenv("NVML_STUB_PRINT")) { puts(function); fflush(stdout); }
    if (code == SUCCESS && us > 0) {
        struct timespec time = {us / 1000000, us % 1000000 * 1000l};
        nanosleep(&time, NULL);
    }
    note(function, device, start_us);
    return code;
}
#define ENTER(us) \
    do { int code = enter(__func__, device, us); if (code) return code; } while (0)

/* Return only once `needed` threads are in here: calls made one after another would stay for ever. */
static void meet(int needed) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
    static int arrived;
    if (needed < 2) return;
    pthread_mutex_lock(&mutex);
    int round = arrived++ / needed;
    pthread_cond_broadcast(&changed);
    while (arrived < (round + 1) * needed) pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (getenv("NVML_STUB_PRINT")) { puts("INFO: a library starts"); fflush(stdout); }
    return setting("NVML_STUB_INIT", SUCCESS);
}
int nvmlShutdown(void) { return setting("NVML_STUB_SHUTDOWN", SUCCESS); }
const char *nvmlErrorString(int code) { (void)code; return "stub error"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "999.01"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = setting("NVML_STUB_GPUS", 1); return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    if (index >= (unsigned)setting("NVML_STUB_GPUS", 1)) return INVALID_ARGUMENT;
    *device = (Device)(intptr_t)(index + 1);
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device device, char *text, unsigned size) {
    ENTER(0);
    snprintf(text, size, "GPU-%08d-0000-0000-0000-000000000000", number(device));
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
    int index;
    if (sscanf(uuid, "GPU-%8d", &index) != 1 || index >= setting("NVML_STUB_GPUS", 1)) return NOT_FOUND;
    *device = (Device)(intptr_t)(index + 1);
    return SUCCESS;
}

int nvmlDeviceGetName(Device device, char *text, unsigned size) { ENTER(0); snprintf(text, size, "Stub GPU"); return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkGeneration(Device device, unsigned *generation) { ENTER(0); *generation = 5; return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkWidth(Device device, unsigned *width) { ENTER(0); *width = 16; return SUCCESS; }
int nvmlDeviceGetCurrPcieLinkWidth(Device device, unsigned *width) { ENTER(0); *width = 8; return SUCCESS; }

static void fill_pci(PciInfo *info, int index) {
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", index + 1);
}

int nvmlDeviceGetPciInfo_v3(Device device, PciInfo *info) {
    ENTER(0);
    fill_pci(info, number(device));
    return SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(Device device, Device other, unsigned *level) {
    ENTER(0);
    *level = number(device) / 2 == number(other) / 2 ? 10 : 50;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned *active) {
    ENTER(0);
    int links = setting("NVML_STUB_NVLINKS", 0);
    if (!links) return NOT_SUPPORTED;
    if (link >= LINKS_OF_MODEL) return INVALID_ARGUMENT;
    *active = (int)link < links;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Device device, unsigned link, unsigned *type) {
    (void)link;
    ENTER(0);
    *type = setting("NVML_STUB_NVLINKS_DIRECT", 0) ? REMOTE_IS_GPU : REMOTE_IS_SWITCH;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device device, unsigned link, PciInfo *info) {
    (void)link;
    ENTER(0);
    fill_pci(info, number(device) ^ 1);
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device device, Utilization *rates) {
    ENTER(0);
    rates->gpu = 40 + number(device);
    rates->memory = 7;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device device, Memory *memory) {
    ENTER(0);
    memory->total = 80 * GIB;
    memory->used = (11 + number(device)) * GIB;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(Device device, MemoryV2 *memory) {
    ENTER(0);
    if (memory->version != MEMORY_V2) return VERSION_MISMATCH;
    memory->total = 80 * GIB;
    memory->reserved = GIB;
    memory->used = (10 + number(device)) * GIB;
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetPcieThroughput(Device device, unsigned direction, unsigned *kb_per_s) {
    ENTER(setting("NVML_STUB_PCIE_US", 0));
    meet(setting("NVML_STUB_PCIE_TOGETHER", 0));
    *kb_per_s = setting("NVML_STUB_PCIE_KB", 1000) * (direction + 1) * (number(device) + 1);
    return SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned *milliwatt) { ENTER(0); *milliwatt = (700 + number(device)) * 1000; return SUCCESS; }

int nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatt) { ENTER(0); *milliwatt = (300 + number(device)) * 1000; return SUCCESS; }

int nvmlDeviceGetClockInfo(Device device, unsigned type, unsigned *mhz) {
    ENTER(0);
    *mhz = type == 1 ? 1500 + number(device) : 1;
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(Device device, unsigned long long *millijoule) {
    static atomic_int calls[MAX_GPUS];
    ENTER(setting("NVML_STUB_ENERGY_US", 0));
    *millijoule = (unsigned long long)(atomic_fetch_add(&calls[number(device)], 1) + 1) * (5 + number(device)) * 1000;
    return SUCCESS;
}

/* How many of these calls on that device came after those that a setting such as "1:3" leaves alone. */
static int beyond(const char *name, Device device, atomic_int *calls) {
    int which, after;
    const char *text = getenv(name);
    int made = atomic_fetch_add(&calls[number(device)], 1) + 1;
    return text && sscanf(text, "%d:%d", &which, &after) == 2 && which == number(device) && made > after ? made - after : 0;
}

int nvmlDeviceGetTotalEccErrors(Device device, unsigned type, unsigned counter, unsigned long long *count) {
    static atomic_int calls[MAX_GPUS];
    ENTER(0);
    if (type != 1 || counter != 0) return INVALID_ARGUMENT; /* uncorrected, since the driver was loaded */
    *count = beyond("NVML_STUB_ECC", device, calls);
    return SUCCESS;
}

typedef struct { Device device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } Event;

int nvmlEventSetCreate(Device **set) { *set = calloc(1, sizeof **set); return SUCCESS; }
int nvmlEventSetFree(Device *set) { free(set); return SUCCESS; }

/* A set is of one device here. */
int nvmlDeviceRegisterEvents(Device device, unsigned long long types, Device *set) {
    ENTER(0);
    if (types != 8) return INVALID_ARGUMENT;
    *set = device;
    return SUCCESS;
}

/* Tells at most one event between two time-outs. */
int nvmlEventSetWait_v2(Device *set, Event *event, unsigned timeout_ms) {
    static atomic_int calls[MAX_GPUS], told[MAX_GPUS];
    Device device = *set;
    ENTER(0);
    if (timeout_ms || told[number(device)]) {
        told[number(device)] = 0;
        return TIMEOUT;
    }
    if (!beyond("NVML_STUB_XID", device, calls)) return TIMEOUT;
    told[number(device)] = 1;
    memset(event, 0, sizeof *event);
    event->device = device;
    event->type = 8;
    event->data = 79;
    return SUCCESS;
}

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;

int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, Process *processes) {
    ENTER(0);
    unsigned running = 1, room = *count;
    for (unsigned some = 0; getenv("NVML_STUB_PROCESSES") && some < 16; some++)
        if (listed_number("NVML_STUB_PROCESSES", some, device)) { running = some; break; }
    *count = running;
    if (room < running) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < running; i++) processes[i] = (Process){.pid = 4000000 + i, .used = 1000 + i};
    return SUCCESS;
}

typedef union { double d; unsigned u; unsigned long long ull; } Value;
typedef struct { unsigned id, scope; long long timestamp, latency_us; unsigned type; int code; Value value; } Field;
enum { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3 };

/* PCIe's byte counters are at 2^32 less one step at first, so that they wrap early. */
int nvmlDeviceGetFieldValues(Device device, int count, Field *fields) {
    static atomic_ullong calls[MAX_GPUS];
    ENTER(0);
    unsigned long long step = strtoull(getenv("NVML_STUB_FIELD_STEP") ? getenv("NVML_STUB_FIELD_STEP") : "1000", NULL, 10);
    unsigned long long value = atomic_fetch_add(&calls[number(device)], 1) * step;
    for (int i = 0; i < count; i++) {
        int pcie = fields[i].id == 197 || fields[i].id == 198;
        fields[i].code = listed_number("NVML_STUB_FIELDS", fields[i].id, device) ? SUCCESS : NOT_SUPPORTED;
        fields[i].type = pcie ? UNSIGNED_INT : UNSIGNED_LONG_LONG;
        fields[i].value.ull = pcie ? (unsigned)(value - step) : value;
    }
    return SUCCESS;
}

typedef struct { unsigned long long timestamp_us; Value value; } Sample;

int nvmlDeviceGetSamples(Device device, int kind, unsigned long long last_us, unsigned *type, unsigned *count, Sample *samples) {
    static atomic_int calls[MAX_GPUS];
    const char *ring = getenv("NVML_STUB_RING");
    (void)kind;
    ENTER(0);
    if (!ring || !strcmp(ring, "absent")) return FUNCTION_NOT_FOUND;
    if (!strcmp(ring, "idle")) return NOT_FOUND;
    *type = UNSIGNED_INT;
    *count = 1;
    if (!samples) return SUCCESS;
    samples[0].timestamp_us = 1000000 + 200000ull * (atomic_fetch_add(&calls[number(device)], 1) + 1);
    samples[0].value.ull = 0;
    samples[0].value.u = atoi(ring) + number(device);
    return samples[0].timestamp_us > last_us ? SUCCESS : NOT_FOUND;
}

typedef struct { unsigned version, supported; } GpmSupport;
typedef struct { Device device; long long taken_us; } GpmSample;
typedef struct { unsigned id; int code; double value; const char *names[3]; } GpmMetric;
typedef struct { unsigned version, count; GpmSample *first, *second; GpmMetric metrics[]; } GpmQuestion;

int nvmlGpmQueryDeviceSupport(Device device, GpmSupport *support) {
    ENTER(0);
    if (support->version != 1) return VERSION_MISMATCH;
    support->supported = setting("NVML_STUB_GPM", 0);
    return SUCCESS;
}

int nvmlGpmSampleAlloc(GpmSample **sample) { *sample = calloc(1, sizeof **sample); return SUCCESS; }

int nvmlGpmSampleGet(Device device, GpmSample *sample) {
    ENTER(0);
    sample->device = device;
    sample->taken_us = now_us();
    return SUCCESS;
}

/* Samples less than 100 ms apart are refused, which the real one does not do: it gives figures that are not right. */
int nvmlGpmMetricsGet(GpmQuestion *question) {
    Device device = question->first->device;
    if (question->version != 1) return VERSION_MISMATCH;
    if (question->second->device != device || question->second->taken_us - question->first->taken_us < 100000) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < question->count; i++) {
        GpmMetric *metric = &question->metrics[i];
        metric->code = listed_number("NVML_STUB_GPM_REFUSED", metric->id, device) ? NOT_SUPPORTED : SUCCESS;
        metric->value = 10.0 * metric->id + number(device);
    }
    return SUCCESS;
}
