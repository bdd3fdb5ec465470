// A CUDA driver that does nothing: what the Python path needs of libcuda.so.1 to launch, so that the bindings' own time
// is in the profile and the driver's is not.
#include <string.h>

typedef int Result;
static unsigned long long launches;

Result cuInit(unsigned flags) { return 0; }
Result cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
Result cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** params, void** extra) {
  launches++;
  return 0;
}
Result cuLaunchKernelEx(const void* config, void* function, void** params, void** extra) {
  launches++;
  return 0;
}
Result cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const void* sizes, const void* strides,
                              const void* box, const void* steps, int interleave, int swizzle, int promotion,
                              int fill) {
  memset(map, 0, 128);
  return 0;
}
Result cuGetProcAddress_v2(const char* name, void** found, int version, unsigned long long flags, int* status);
Result cuGetProcAddress(const char* name, void** found, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, found, version, flags, 0);
}

static const struct {
  const char* name;
  void* function;
} known[] = {{"cuInit", cuInit},
             {"cuDriverGetVersion", cuDriverGetVersion},
             {"cuLaunchKernel", cuLaunchKernel},
             {"cuLaunchKernelEx", cuLaunchKernelEx},
             {"cuTensorMapEncodeTiled", cuTensorMapEncodeTiled},
             {"cuGetProcAddress", cuGetProcAddress_v2}};

Result cuGetProcAddress_v2(const char* name, void** found, int version, unsigned long long flags, int* status) {
  *found = 0;
  for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
    if (!strcmp(name, known[i].name)) *found = known[i].function;
  return *found ? 0 : 500;  // not found
}

unsigned long long counted_launches(void) { return launches; }
