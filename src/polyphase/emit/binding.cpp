// From Python to a launch: checks, the tensors' device, its current stream, the tensor maps of boxes.

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

std::size_t pointers_of(std::size_t number);
std::size_t geometry_bytes_of(std::size_t number);
cudaError_t launch_kernel(std::size_t number, dim3 grid, dim3 block, std::size_t shared_bytes, void** arguments,
                          cudaStream_t stream);

// Boxes that TMA takes of one of a kernel's tensors, as the driver is told of them: dimensions innermost
// first, strides in bytes, without the first dimension's. Their tensor map lies `place` bytes into the last parameter.
struct Boxes {
  std::uint64_t sizes[5], strides[4];
  std::uint32_t box[5], steps[5], data_type, swizzle, tensor, place;
};

// The driver's cuTensorMapEncodeTiled. It is found at run time, since nothing here links the driver, and CUDA 11 has
// none of its types.
typedef int (*EncodeTiled)(void* map, unsigned data_type, std::uint32_t rank, void* address, const std::uint64_t* sizes,
                           const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t* steps,
                           unsigned interleave, unsigned swizzle, unsigned promotion, unsigned fill);

EncodeTiled find_encode_tiled() {
  void* found = nullptr;
#if CUDART_VERSION >= 13000
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault);
#else
  cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault);
#endif
  TORCH_CHECK(found, "the CUDA driver or runtime knows no tensor maps: both must be of CUDA 12 or newer");
  return (EncodeTiled)found;
}

// Puts the tensor maps of boxes into the geometry.
void place_tensor_maps(std::string& geometry, const std::string& packed, const std::vector<void*>& addresses) {
  static const EncodeTiled encode_tiled = find_encode_tiled();
  alignas(64) char map[128];
  Boxes boxes;
  const std::size_t count = packed.size() / sizeof boxes;
  TORCH_CHECK(packed.size() == count * sizeof boxes, "boxes are described by ", sizeof boxes, " bytes each, given ",
              packed.size());
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(&boxes, packed.data() + i * sizeof boxes, sizeof boxes);
    TORCH_CHECK(boxes.place + sizeof map <= geometry.size(), "a tensor map takes ", sizeof map, " bytes from ",
                boxes.place, " on, and the kernel's last parameter has ", geometry.size());
    void* address = addresses.at(boxes.tensor);
    if (address == nullptr) address = reinterpret_cast<void*>(sizeof map);  // of an empty tensor no box is brought
    const int status = encode_tiled(map, boxes.data_type, 5, address, boxes.sizes, boxes.strides, boxes.box,
                                    boxes.steps, 0 /* not interleaved */, boxes.swizzle,
                                    2 /* lines of 128 bytes to L2 */, 0 /* zeros beside the tensor */);
    TORCH_CHECK(status == 0, "the CUDA driver makes no tensor map, error ", status, ": data type ", boxes.data_type,
                ", sizes ", c10::ArrayRef<std::uint64_t>(boxes.sizes), ", strides ",
                c10::ArrayRef<std::uint64_t>(boxes.strides), ", box ", c10::ArrayRef<std::uint32_t>(boxes.box),
                ", swizzle ", boxes.swizzle, ", address ", address);
    std::memcpy(&geometry[boxes.place], map, sizeof map);
  }
}

// Kernel `number` on `tensors`, of which a missing one is a null pointer, and the bytes of its last parameter.
// The tensor maps of `boxes` are put among them.
void launch(int64_t number, std::string geometry, const std::string& boxes, int64_t grid_x, int64_t grid_y,
            int64_t grid_z, int64_t block, int64_t shared_bytes,
            const std::vector<std::optional<at::Tensor>>& tensors) {
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
  const c10::cuda::CUDAGuard guard(device);
  if (!boxes.empty()) {
    C10_CUDA_CHECK(cudaSetDevice(device.index()));  // a thread may not have the context yet that the driver asks for
    place_tensor_maps(geometry, boxes, addresses);
  }
  arguments.push_back(geometry.data());
  C10_CUDA_CHECK(launch_kernel(number, dim3(grid_x, grid_y, grid_z), dim3(block), shared_bytes, arguments.data(),
                               c10::cuda::getCurrentCUDAStream()));
}
