// A second device for tests on a machine that has only a CPU.
//
// It owns memory of its own kind under the dispatch key PrivateUse1. Memory, views and copies are
// native; every other op falls back to the CPU: inputs copied over, CPU kernel run, results copied
// back. Autograd gives it a thread of its own, as it does for every device but the CPU.

#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <cstring>

namespace {

using c10::DeviceType;
const c10::Device kSecond(DeviceType::PrivateUse1, 0);

// ---- memory -------------------------------------------------------------------------------------

struct HeapAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* memory = num_bytes > 0 ? std::malloc(num_bytes) : nullptr;
    return {memory, memory, &std::free, kSecond};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &std::free;
  }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
};

HeapAllocator allocator;
REGISTER_ALLOCATOR(DeviceType::PrivateUse1, &allocator);

void grow(c10::StorageImpl* storage, size_t num_bytes) {
  if (num_bytes <= storage->nbytes()) {
    return;
  }
  auto memory = allocator.allocate(num_bytes);
  if (storage->nbytes() > 0) {
    std::memcpy(memory.get(), storage->data(), storage->nbytes());
  }
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(num_bytes);
}

// ---- one device, one stream, nothing asynchronous -----------------------------------------------

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::PrivateUse1> {
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  c10::Device getDevice() const override {
    return kSecond;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return kSecond;
  }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, kSecond);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, kSecond);
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, kSecond);
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    *event = const_cast<c10::Device*>(&kSecond);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const override {
    return at::detail::createCPUGenerator(0);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    grow(storage.unsafeGetStorageImpl(), num_bytes);
  }
};

const bool hooks_are_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

// ---- native kernels: factories, views, copies ---------------------------------------------------

using OptionalType = std::optional<at::ScalarType>;
using OptionalLayout = std::optional<at::Layout>;
using OptionalDevice = std::optional<at::Device>;
using OptionalFormat = std::optional<at::MemoryFormat>;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, OptionalType dtype, OptionalLayout, OptionalDevice,
                 std::optional<bool>, OptionalFormat format) {
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, OptionalType dtype,
                         OptionalLayout, OptionalDevice, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

// A CPU tensor over the memory of a tensor of this device.
at::Tensor as_cpu(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) {
    return tensor;
  }
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(tensor.storage().mutable_data(), tensor.sizes(), tensor.strides(),
                       tensor.storage_offset(), [](void*) {}, options);
}

std::optional<at::Tensor> as_cpu(const std::optional<at::Tensor>& tensor) {
  if (tensor.has_value() && tensor->defined()) {
    return as_cpu(*tensor);
  }
  return std::nullopt;
}

at::Tensor to_second(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.to(kSecond) : tensor;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  at::AutoDispatchBelowADInplaceOrView guard;
  as_cpu(to).copy_(as_cpu(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (self.sizes() != to.sizes()) {
    to.resize_(self.sizes());
  }
  as_cpu(to).copy_(as_cpu(self));
  return to;
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  return as_cpu(tensor).item();
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  return at::native::view(self, size);
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, OptionalFormat) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t num_elements = impl->storage_offset() + c10::multiply_integers(size);
  grow(impl->unsafe_storage().unsafeGetStorageImpl(), num_elements * impl->itemsize());
  return self;
}

at::Tensor& set_storage_strided(at::Tensor& self, at::Storage storage, int64_t offset,
                                at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset, size, stride);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const int64_t size = storage.nbytes() / self.dtype().itemsize();
  return at::native::set_storage_cpu_(self, storage, 0, {size}, {1});
}

// ATen sends convolutions of such devices here instead of to the fallback.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return to_second(at::convolution(as_cpu(input), as_cpu(weight), as_cpu(bias), stride, padding,
                                   dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const int64_t num_channels = grad.size(1);
  auto found = at::convolution_backward(
      as_cpu(grad), as_cpu(input), as_cpu(weight), at::IntArrayRef(num_channels), stride, padding,
      dilation, transposed, output_padding, groups, wanted);
  return {to_second(std::get<0>(found)), to_second(std::get<1>(found)),
          to_second(std::get<2>(found))};
}

// The fallback copies back what the schema says is written, and this schema does not say so of the
// running statistics: through it they would never be updated.
std::tuple<at::Tensor, at::Tensor, at::Tensor> native_batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var, bool training, double momentum, double eps) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto found = at::native_batch_norm(
      as_cpu(input), as_cpu(weight), as_cpu(bias), as_cpu(running_mean), as_cpu(running_var),
      training, momentum, eps);
  return {to_second(std::get<0>(found)), to_second(std::get<1>(found)),
          to_second(std::get<2>(found))};
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_storage_strided);
  library.impl("set_.source_Storage", set_storage);
  library.impl("native_batch_norm", native_batch_norm);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
}

}  // namespace
