// The kernels by number, for binding.cpp. POLYPHASE_KERNELS is the list of them.

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

struct Entry {
  const void* kernel;
  std::size_t pointers, geometry_bytes;
};

// Every kernel takes pointers and, last, the sizes of the call as one value, if it needs any.
template <class... Parameters>
Entry entry(void (*kernel)(Parameters...)) {
  Entry found = {(const void*)kernel, 0, 0};
  const bool are_pointers[] = {std::is_pointer<Parameters>::value...};
  const std::size_t sizes[] = {sizeof(Parameters)...};
  for (std::size_t i = 0; i < sizeof...(Parameters); ++i)
    (are_pointers[i] ? found.pointers : found.geometry_bytes) += are_pointers[i] ? 1 : sizes[i];
  return found;
}

static const Entry entries[] = {POLYPHASE_KERNELS};

std::size_t pointers_of(std::size_t number) { return entries[number].pointers; }
std::size_t geometry_bytes_of(std::size_t number) { return entries[number].geometry_bytes; }

cudaError_t launch_kernel(std::size_t number, dim3 grid, dim3 block, std::size_t shared_bytes, void** arguments,
                          cudaStream_t stream) {
  const void* const kernel = entries[number].kernel;
  if (shared_bytes > 32 << 10) {  // beside its own, which a kernel may use; more is to be asked for
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    if (status != cudaSuccess) return status;
  }
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}
