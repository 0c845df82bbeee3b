/* A stand-in for NVIDIA's libnvidia-ml.so.1 with two GPUs, at its C interface. The file $NVML_STATE says what they
   report, one "name value" a line; a line "1:name value" is for GPU 1 alone. A value below 0 is an error code. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, GPUS = 2 };
typedef unsigned long long u64;
typedef struct { int index; } *device;
typedef struct { device gpu; u64 type, data; unsigned instance, compute; } event;
static struct { int index; } gpus[GPUS] = {{0}, {1}};
static long long seen_xid = 0;

static long long state(int gpu, const char *name) {
    char key[80], own[80];
    long long value, found = -NOT_SUPPORTED;
    int exact = 0;
    FILE *file = fopen(getenv("NVML_STATE") ? getenv("NVML_STATE") : "/nowhere", "r");
    if (!file) return -DRIVER_NOT_LOADED;
    snprintf(own, sizeof own, "%d:%s", gpu, name);
    while (fscanf(file, "%79s %lld", key, &value) == 2) {
        if (!strcmp(key, own)) { found = value; exact = 1; }
        if (!strcmp(key, name) && !exact) found = value;
    }
    fclose(file);
    return found;
}

static int answer(device gpu, const char *name, long long *value) {
    if (state(gpu->index, "lost") > 0) return GPU_IS_LOST;
    *value = state(gpu->index, name);
    return *value < 0 ? (int)-*value : OK;
}

static int small(device gpu, const char *name, unsigned *value) {
    long long read;
    int status = answer(gpu, name, &read);
    if (!status) *value = (unsigned)read;
    return status;
}

int nvmlInitWithFlags(unsigned flags) { return state(0, "temperature") == -DRIVER_NOT_LOADED ? DRIVER_NOT_LOADED : OK; }
const char *nvmlErrorString(int status) { return status == GPU_IS_LOST ? "GPU is lost" : "an error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *gpu) { *gpu = (device)&gpus[index]; return OK; }
int nvmlDeviceGetIndex(device gpu, unsigned *index) { *index = (unsigned)gpu->index; return OK; }
int nvmlDeviceGetUUID(device gpu, char *text, unsigned size) { snprintf(text, size, "GPU-%04d", gpu->index); return OK; }
int nvmlDeviceGetTemperature(device gpu, int sensor, unsigned *value) { return small(gpu, "temperature", value); }
int nvmlDeviceGetPowerUsage(device gpu, unsigned *value) { return small(gpu, "power", value); }
int nvmlDeviceGetClockInfo(device gpu, int type, unsigned *value) { return small(gpu, type == 1 ? "sm_clock" : "?", value); }
int nvmlDeviceGetCurrPcieLinkWidth(device gpu, unsigned *value) { return small(gpu, "lanes", value); }
int nvmlDeviceGetMaxPcieLinkWidth(device gpu, unsigned *value) { return small(gpu, "most_lanes", value); }
int nvmlDeviceGetCurrPcieLinkGeneration(device gpu, unsigned *value) { return small(gpu, "generation", value); }
int nvmlDeviceGetUtilizationRates(device gpu, unsigned *rates) { rates[1] = 0; return small(gpu, "utilization", rates); }

int nvmlDeviceGetCurrentClocksEventReasons(device gpu, u64 *reasons) {
    return answer(gpu, "reasons", (long long *)reasons);
}

int nvmlDeviceGetTotalEccErrors(device gpu, int kind, int counter, u64 *count) {
    if (kind != 1) return NOT_SUPPORTED; /* 1: uncorrected */
    return answer(gpu, counter == 0 ? "ecc_volatile" : "ecc_lifetime", (long long *)count);
}

int nvmlDeviceGetRemappedRows(device gpu, unsigned *correctable, unsigned *others, unsigned *pending, unsigned *failed) {
    int status = small(gpu, "remapped", others);
    *correctable = 0;
    if (small(gpu, "remap_pending", pending)) *pending = 0;
    if (small(gpu, "remap_failed", failed)) *failed = 0;
    return status;
}

int nvmlEventSetCreate(void **set) { *set = gpus; return OK; }
int nvmlDeviceRegisterEvents(device gpu, u64 types, void *set) { return types == 8 ? OK : NOT_SUPPORTED; }

int nvmlEventSetWait_v2(void *set, event *found, unsigned timeout_ms) {
    long long xid = state(1, "xid");
    if (xid > 0 && xid != seen_xid) {
        seen_xid = xid;
        *found = (event){(device)&gpus[1], 8, (u64)xid, 0, 0};
        return OK;
    }
    usleep(timeout_ms * 1000);
    return TIMEOUT;
}
