// From Python to a launch: checks, the tensors' device, its current stream.

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>

#include <optional>
#include <string>
#include <vector>

std::size_t pointers_of(std::size_t number);
std::size_t geometry_bytes_of(std::size_t number);
cudaError_t launch_kernel(std::size_t number, dim3 grid, dim3 block, std::size_t shared_bytes, void** arguments,
                          cudaStream_t stream);

// Kernel `number` on `tensors`, of which a missing one is a null pointer, and the bytes of its last parameter.
void launch(int64_t number, const std::string& geometry, int64_t grid_x, int64_t grid_y, int64_t grid_z, int64_t block,
            int64_t shared_bytes, const std::vector<std::optional<at::Tensor>>& tensors) {
  TORCH_CHECK(tensors.size() == pointers_of(number) && geometry.size() == geometry_bytes_of(number), "kernel ", number,
              " takes ", pointers_of(number), " tensors and ", geometry_bytes_of(number), " bytes, given ",
              tensors.size(), " tensors and ", geometry.size(), " bytes");
  const at::Device device = tensors.front()->device();
  std::vector<void*> addresses, arguments;
  addresses.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    TORCH_CHECK(!tensor || (tensor->is_cuda() && tensor->device() == device),
                "all tensors must be on one CUDA device, got ", device, " and ", tensor ? tensor->device() : device);
    addresses.push_back(tensor ? tensor->data_ptr() : nullptr);
  }
  for (void*& address : addresses) arguments.push_back(&address);
  arguments.push_back((void*)geometry.data());
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(launch_kernel(number, dim3(grid_x, grid_y, grid_z), dim3(block), shared_bytes, arguments.data(),
                               c10::cuda::getCurrentCUDAStream()));
}
