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
 *     NVML_STUB_UNSUPPORTED      calls that are not supported: "nvmlDeviceGetPowerUsage,nvmlDeviceGetClockInfo@1",
 *                                @1 on device 1 only
 *     NVML_STUB_LOST             "1:20": device 1 is lost after 20 calls on it
 *     NVML_STUB_HANG             "nvmlDeviceGetPowerUsage:3": that call never returns after 3 times
 *     NVML_STUB_INIT             code that nvmlInit returns (0)
 *     NVML_STUB_SHUTDOWN         code that nvmlShutdown returns (0)
 *     NVML_STUB_LOG              file that gets a line per device call: start_us end_us thread process function device
 *
 * Answers tell devices apart: device i is at 40 + i %, has 10 + i GiB in use beside 1 GiB that the driver reserves,
 * draws 300 + i W at 1500 + i MHz. Devices 2 n and 2 n + 1 share a PCIe switch.
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

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15, VERSION_MISMATCH = 25 };
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

static int unsupported(const char *function, Device device) {
    char entry[128];
    const char *rest = getenv("NVML_STUB_UNSUPPORTED");
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

static int lost(Device device) {
    int which, after;
    const char *text = getenv("NVML_STUB_LOST");
    int calls = atomic_fetch_add(&calls_on[number(device) % MAX_GPUS], 1);
    return text && sscanf(text, "%d:%d", &which, &after) == 2 && which == number(device) && calls >= after;
}

static void hang(const char *function) {
    const char *text = getenv("NVML_STUB_HANG");
    size_t length = strlen(function);
    if (!text || strncmp(text, function, length) || text[length] != ':') return;
    if (atomic_fetch_add(&calls_before_hang, 1) >= atoi(text + length + 1))
        for (;;) pause();
}

/* What every call on a device does before it answers; blocks for `us`. */
static int enter(const char *function, Device device, int us) {
    long long start_us = now_us();
    int code = lost(device) ? GPU_IS_LOST : unsupported(function, device) ? NOT_SUPPORTED : SUCCESS;
    hang(function);
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

int nvmlInitWithFlags(unsigned flags) { (void)flags; return setting("NVML_STUB_INIT", SUCCESS); }
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

int nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatt) { ENTER(0); *milliwatt = (300 + number(device)) * 1000; return SUCCESS; }

int nvmlDeviceGetClockInfo(Device device, unsigned type, unsigned *mhz) {
    ENTER(0);
    *mhz = type == 1 ? 1500 + number(device) : 1;
    return SUCCESS;
}
