// The device "threaded" as a Python module: its memory is the host's, it computes nothing, and its backward passes run
// in a thread of PyTorch's engine, as a GPU's do.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1> {
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return kStream; }
  c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
} hooks;

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::aligned_alloc(512, (bytes + 511) / 512 * 512) : nullptr;
    return {data, data, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} memory;

at::Tensor empty(at::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic_symint(size, &memory, kKeys, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, strides, &memory, kKeys, dtype.value_or(at::kFloat));
}

at::Tensor sum(const at::Tensor& self, at::OptionalIntArrayRef, bool, std::optional<at::ScalarType>) {
  return at::detail::empty_generic({self.size(1)}, &memory, kKeys, self.scalar_type(), std::nullopt);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("sum.dim_IntList", sum);
}

// `torch._C._dynamo.guards._empty_strided_cuda` of this device.
PyObject* empty_past_dispatcher(PyObject*, PyObject* args) {
  c10::SmallVector<int64_t, 8> sizes, strides;
  for (int which = 0; which < 2; which++) {
    PyObject* numbers = PyTuple_GET_ITEM(args, which);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); i++)
      (which ? strides : sizes).push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(numbers, i)));
  }
  at::ScalarType dtype = reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(args, 2))->scalar_type;
  return THPVariable_Wrap(at::detail::empty_strided_generic(sizes, strides, &memory, kKeys, dtype));
}

PyMethodDef methods[] = {{"empty_strided", empty_past_dispatcher, METH_VARARGS, nullptr}, {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "threaded_device", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_threaded_device() {
  c10::register_privateuse1_backend("threaded");
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &memory);
  return PyModule_Create(&module);
}
