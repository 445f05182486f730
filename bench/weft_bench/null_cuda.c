// A libcuda that does nothing, for the host's part of a launch: Triton loads it, asks for limits and launches.
#include <stdint.h>
#include <stdlib.h>

enum {
  SHARED = 8,
  WARP = 10,
  REGISTERS = 12,
  CLOCK = 13,
  PROCESSORS = 16,
  MEMORY_CLOCK = 36,
  BUS = 37,
  MAJOR = 75,
  MINOR = 76,
  SHARED_PER_SM = 81,
  SHARED_OPTIN = 97
};

int launches = 0;

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = 0, 0; }

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case SHARED:
      *value = 49152;
      break;
    case WARP:
      *value = 32;
      break;
    case REGISTERS:
      *value = 65536;
      break;
    case CLOCK:
      *value = 1980000;
      break;
    case PROCESSORS:
      *value = 132;
      break;
    case MEMORY_CLOCK:
      *value = 2619000;
      break;
    case BUS:
      *value = 5120;
      break;
    case MAJOR:
      *value = 9;
      break;
    case MINOR:
      *value = 0;
      break;
    case SHARED_PER_SM:
      *value = 233472;
      break;
    case SHARED_OPTIN:
      *value = 232448;
      break;
    default:
      *value = 1024;
  }
  return 0;
}

int cuCtxGetCurrent(void** context) { return *context = (void*)1, 0; }
int cuCtxSetCurrent(void* context) { return 0; }
int cuCtxGetDevice(int* device) { return *device = 0, 0; }
int cuCtxGetLimit(size_t* value, int limit) { return *value = 0, 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)1, 0; }
int cuModuleLoadData(void** module, const void* image) { return *module = (void*)2, 0; }
int cuModuleUnload(void* module) { return 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) { return *function = (void*)3, 0; }
int cuFuncGetAttribute(int* value, int attribute, void* function) { return *value = attribute ? 0 : 1024, 0; }
int cuFuncSetAttribute(void* function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void* function, int config) { return 0; }
int cuGetErrorString(int error, const char** text) { return *text = "none", 0; }
int cuPointerGetAttribute(void* value, int attribute, uint64_t pointer) { return *(uint64_t*)value = pointer, 0; }
int cuPointerGetAttributes(unsigned count, int* attributes, void** values, uint64_t pointer) {
  for (unsigned i = 0; i < count; i++) *(uint64_t*)values[i] = pointer;
  return 0;
}
int cuStreamIsCapturing(void* stream, int* status) { return *status = 0, 0; }
int cuLaunchKernelEx(void* config, void* function, void** arguments, void** more) { return launches++, 0; }
int cuOccupancyMaxActiveClusters(int* count, void* function, void* config) { return *count = 1, 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }
